"""The laws on SmolLM2 itself, on the cpu backend's best level: bit for bit under pressure.

Prompts as users write them, greedy and sampled, long enough for several attention tiles and KV
splits. What disturbs them is what disturbs a busy server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

LONG = "The river rose again in the spring, and the people of the valley counted the days. " * 36
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "巴黎是哪个国家的首都？",
    "Here is a list of fruit: 🍎, 🍌,",
    LONG,
    LONG + "Then, one morning,",
)


def params(number: int) -> SamplingParams:
    """Greedy for even numbers, sampled with everything on for odd ones."""
    sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 100, "presence_penalty": 0.5}
    return SamplingParams(
        **({"temperature": 0} if number % 2 == 0 else sampled),  # type: ignore[arg-type]
        seed=number,
        max_tokens=24,
        logprobs=3,
        ignore_eos=True,
    )


def answers(llm: LLM, numbers: list[int]) -> list[Any]:
    """Ids and logprobs of the prompts with these numbers, all submitted at once."""
    outputs = llm.generate(
        [PROMPTS[number] for number in numbers],
        [params(number) for number in numbers],
        use_tqdm=False,
    )
    return [
        (x.outputs[0].token_ids, [(y.logprob, y.top) for y in x.outputs[0].logprobs or ()])
        for x in outputs
    ]


@pytest.fixture(scope="module")
def alone(model_file: Path) -> Iterator[list[Any]]:
    """The undisturbed answers: one at a time, whole prompts, two threads, no prefix cache."""
    llm = LLM(str(model_file), max_model_len=1024, threads=2, enable_prefix_caching=False)
    yield [answers(llm, [number])[0] for number in range(len(PROMPTS))]
    llm.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"threads": 1, "max_num_batched_tokens": 700},
        {"max_num_batched_tokens": 37, "block_size": 8},
        {"max_num_batched_tokens": 130, "block_size": 64, "enable_prefix_caching": False},
    ],
    ids=["batched", "one-thread", "small-chunks", "large-blocks"],
)
def test_disturbed_is_undisturbed(
    model_file: Path, alone: list[Any], settings: dict[str, Any]
) -> None:
    """R44, R111: batch, threads, chunks and blocks never move a bit."""
    llm = LLM(str(model_file), max_model_len=1024, **settings)
    numbers = [3, 5, 1, 4, 0, 2]
    assert answers(llm, numbers) == [alone[number] for number in numbers]
    llm.close()


def test_prefix_hits_are_fresh(model_file: Path, alone: list[Any]) -> None:
    """C4, R114: what the cache returns are the bits that a prefill computes."""
    llm = LLM(str(model_file), max_model_len=1024)
    for number in (4, 5, 4):
        assert answers(llm, [number]) == [alone[number]]
    assert llm.stats().prefix_hits_tokens > 1000
    llm.close()


def test_preempted_is_undisturbed(model_file: Path, alone: list[Any]) -> None:
    """R99, C14: recomputed after preemption in a pool that holds half of what they want."""
    llm = LLM(str(model_file), max_model_len=1024, num_kv_blocks=64, max_num_batched_tokens=200)
    assert answers(llm, [0, 1, 2, 3]) == alone[:4]
    assert llm.stats().num_preemptions == 0, "four short ones fit"
    tight = LLM(str(model_file), max_model_len=96, num_kv_blocks=13, block_size=8)
    assert answers(tight, [0, 1, 2, 3]) == alone[:4]
    assert tight.stats().num_preemptions > 0, "the pool was large enough: nothing was tested"
    llm.close()
    tight.close()
