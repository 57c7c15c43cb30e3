"""Swap, tiers, n answers and copied blocks on real backends: the same bits as undisturbed (R98).

The pool is far too small for the workload; each combination also shows that K/V really moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from beds.backends import TEST_BACKENDS, backend_settings, kernels_of
from beds.tiny_files import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.core.event_log import Reason
from octavo.engine.input_processor import derive_seed
from octavo.outputs import CompletionOutput

PROMPTS = [[3 + (7 * i + 5 * j) % (VOCAB_SIZE - 3) for j in range(9 + 4 * i)] for i in range(5)]
PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 2), seed=i, n=1 + i % 3, max_tokens=30, logprobs=2, ignore_eos=True
    )
    for i in range(5)
]
COMBINATIONS = [
    # means, tokens in the pool, in RAM, in the file, block_size, prefix caching, token budget
    ("swap", 160, 4096, 0, 16, False, 512),
    ("swap", 160, 4096, 0, 16, True, 512),
    ("swap", 160, 0, 4096, 16, True, 512),
    ("swap", 160, 128, 128, 16, True, 7),
    ("swap", 128, 64, 4096, 4, False, 9),
    ("swap", 128, 64, 4096, 4, True, 512),
    ("swap", 128, 64, 0, 2, True, 16),
    ("swap", 192, 4096, 0, 32, True, 5),
    ("threshold", 128, 512, 512, 8, True, 16),
    ("threshold", 160, 4096, 0, 16, False, 512),
    ("auto", 160, 512, 4096, 16, True, 16),
    ("auto", 128, 0, 4096, 4, False, 512),
    ("recompute", 160, 512, 512, 16, True, 16),
]


def bits(answer: CompletionOutput) -> tuple[Any, ...]:
    logprobs = [
        (x.token_id, x.logprob, x.rank, tuple((y.token_id, y.logprob) for y in x.top))
        for x in answer.logprobs or ()
    ]
    return answer.token_ids, answer.text, answer.finish_reason, logprobs


@pytest.fixture(scope="module", params=TEST_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("laws") / "tiny.gguf"))


@pytest.fixture(scope="module")
def undisturbed(model: str, backend: str) -> Iterator[list[list[tuple[Any, ...]]]]:
    """Each answer by itself, in an engine with room for everything and no cache."""
    llm = LLM(
        model,
        max_model_len=128,
        num_kv_blocks=64,
        enable_prefix_caching=False,
        **backend_settings(backend),
    )

    def answer(i: int, index: int) -> tuple[Any, ...]:
        seed = i if index == 0 else derive_seed(i, index)
        params = replace(PARAMS[i], n=1, seed=seed)
        return bits(llm.generate([PROMPTS[i]], params, use_tqdm=False)[0].outputs[0])

    yield [[answer(i, index) for index in range(PARAMS[i].n)] for i in range(5)]
    llm.close()


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c)))
def test_whatever_moves_the_bits_are_the_same(
    model: str, backend: str, undisturbed: list[Any], combination: tuple[Any, ...]
) -> None:
    """R98, R100, C25: twice over, so that the second time finds prefixes in the tiers."""
    means, pool, ram, file, block_size, prefix_caching, budget = combination
    nbytes = kernels_of(backend).kv_bytes_per_token(
        num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM
    )
    llm = LLM(
        model,
        max_model_len=128,
        num_kv_blocks=pool // block_size,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
        preemption_mode=means,
        swap_threshold=24,
        ram_tier_memory=ram * nbytes,
        file_tier_memory=file * nbytes,
        **backend_settings(backend),
    )
    for _ in range(2):
        answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [[bits(x) for x in answer.outputs] for answer in answers] == undisturbed
    counts = llm._engine.core.scheduler.event_log.counts
    assert counts[Reason.PREEMPTED] > 0
    assert counts[Reason.LOADED] > 0 or means == "auto"
    if means == "swap":
        assert counts[Reason.SWAPPED] > 0
    llm._engine.core.scheduler.audit()
    llm.close()
