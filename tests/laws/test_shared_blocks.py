"""Copy-on-write on real backends, bit for bit: n answers share one prefill, and a prompt that
parts from a cached one inside a block copies the shared tokens of that block (R34)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from beds.backends import backend_settings
from beds.whole_answers import alone, bits, prompt
from octavo import LLM, SamplingParams

SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=12, logprobs=3, ignore_eos=True)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "prefix_caching"),
    [(16, 64, True), (16, 64, False), (4, 30, True), (4, 30, False), (32, 16, True)],
)
def test_n_answers_are_n_requests(
    model: str, backend: str, lone: LLM, block_size: int, num_blocks: int, prefix_caching: bool
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
    params = replace(SAMPLED, n=4)
    for length in (1, 2, 15, 16, 17, 33):
        (shared,) = llm.generate([prompt(length)], params, use_tqdm=False)
        assert [bits(answer) for answer in shared.outputs] == alone(lone, prompt(length), params)
    llm.close()


@pytest.mark.parametrize("block_size", [2, 16, 32])
def test_shared_tokens_of_a_block_are_those_of_a_fresh_run(
    model: str, backend: str, lone: LLM, block_size: int
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
        assert [bits(found.outputs[0])] == alone(lone, parted, SAMPLED)
    llm.close()
