"""Copy-on-write on real backends, bit for bit: n answers share one prefill, and a prompt that
parts from a cached one inside a block copies the shared tokens of that block (R34)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from beds.backends import TEST_BACKENDS, backend_settings
from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.engine.input_processor import derive_seed
from octavo.outputs import CompletionOutput

SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=12, logprobs=3, ignore_eos=True)


def prompt(length: int, start: int = 0) -> list[int]:
    return [3 + (7 * i + 13 * start) % (VOCAB_SIZE - 3) for i in range(length)]


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
def alone(model: str, backend: str) -> Iterator[LLM]:
    llm = LLM(
        model,
        max_model_len=128,
        num_kv_blocks=64,
        enable_prefix_caching=False,
        **backend_settings(backend),
    )
    yield llm
    llm.close()


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "prefix_caching"),
    [(16, 64, True), (16, 64, False), (4, 30, True), (4, 30, False), (32, 16, True)],
)
def test_n_answers_are_n_requests(
    model: str, backend: str, alone: LLM, block_size: int, num_blocks: int, prefix_caching: bool
) -> None:
    """R34: whatever the length of the prompt, and when the pool is too small for all of them."""
    llm = LLM(
        model,
        max_model_len=128,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        enable_prefix_caching=prefix_caching,
        **backend_settings(backend),
    )
    for length in (1, 2, 15, 16, 17, 33):
        (shared,) = llm.generate([prompt(length)], replace(SAMPLED, n=4), use_tqdm=False)
        for index, answer in enumerate(shared.outputs):
            seed = 11 if index == 0 else derive_seed(11, index)
            (single,) = alone.generate(
                [prompt(length)], replace(SAMPLED, seed=seed), use_tqdm=False
            )
            assert bits(answer) == bits(single.outputs[0])
    llm.close()


@pytest.mark.parametrize("block_size", [2, 16, 32])
def test_shared_tokens_of_a_block_are_those_of_a_fresh_run(
    model: str, backend: str, alone: LLM, block_size: int
) -> None:
    """R34, R114: parting after every number of tokens around a block, greedy and sampled."""
    llm = LLM(
        model,
        max_model_len=128,
        block_size=block_size,
        num_kv_blocks=256 // block_size,
        **backend_settings(backend),
    )
    llm.generate([prompt(64)], SAMPLED, use_tqdm=False)
    for num_shared in (1, 5, 15, 16, 17, 23, 31, 32, 40):
        parted = prompt(num_shared) + prompt(9, num_shared)
        before = llm.stats().prefix_hits_tokens
        (found,) = llm.generate([parted], SAMPLED, use_tqdm=False)
        assert llm.stats().prefix_hits_tokens - before >= num_shared
        (fresh,) = alone.generate([parted], SAMPLED, use_tqdm=False)
        assert bits(found.outputs[0]) == bits(fresh.outputs[0])
    llm.close()
