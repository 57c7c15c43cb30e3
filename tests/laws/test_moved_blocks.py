"""Whatever moves, whoever yields and in whatever order: the same bits as undisturbed (R98).

Hand-picked hard combinations on real backends. The pool is far too small for the workload, and
each combination also shows that what it is about has really happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from beds.backends import backend_settings, kernels_of
from beds.tiny_files import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS
from beds.whole_answers import Bits, Job, alone, bits, prompt, serve
from octavo import LLM, SamplingParams
from octavo.core.event_log import Reason

JOBS = [
    Job(
        # three begin alike and part inside a block, two are equal, all in two scopes
        token_ids=prompt(19, i % 2) + prompt(1 + 5 * (i % 4), i // 2 % 4),
        params=SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            n=1 + i % 3,
            max_tokens=14 + 3 * (i % 5),
            logprobs=2,
            presence_penalty=0.5 * (i % 2),
            ignore_eos=True,
        ),
        arrival_step=2 * i,
        priority=i * 5 % 3,
        scope="salt" * (i % 3 == 2),
        tenant=str(i % 3),
    )
    for i in range(9)
]


@dataclass(frozen=True)
class Case:
    """Sizes are in tokens."""

    name: str
    means: str
    ram: int
    file: int
    pool: int = 128
    block_size: int = 16
    budget: int = 512
    caching: bool = True
    policy: str = "fcfs"
    victim: str = "last_arrived"
    mode: str = "continuous"
    broken: bool = False
    """The file takes nothing, like one on a full disk."""
    rest: tuple[tuple[str, Any], ...] = ()
    happens: tuple[Reason, ...] = (Reason.SWAPPED, Reason.LOADED)


CASES = [
    Case("swap to RAM, no cache", "swap", 4096, 0, caching=False),
    Case("swap to RAM beside a cache", "swap", 4096, 0, policy="priority"),
    Case("swap to a file only", "swap", 0, 4096, victim="most_generated"),
    Case("both full", "swap", 32, 32, budget=7, happens=(Reason.TIERS_FULL, Reason.DROPPED)),
    Case("small RAM, all moves on", "swap", 64, 4096, block_size=4, budget=9, policy="fair_share"),
    Case("small blocks, no cache", "swap", 64, 4096, block_size=4, budget=9, caching=False),
    Case("tiniest blocks", "swap", 128, 128, block_size=2, budget=16, policy="longest_prefix"),
    Case("large blocks", "swap", 4096, 0, pool=192, block_size=32, budget=5,
         victim="fewest_generated"),
    Case("threshold", "threshold", 256, 512, block_size=8, budget=16, policy="priority",
         rest=(("priority_ageing_steps", 5), ("swap_threshold", 24))),
    Case("auto", "auto", 512, 4096, budget=16, victim="most_generated",
         happens=(Reason.ESTIMATED,)),
    Case("auto, slow tier", "auto", 0, 4096, block_size=4, caching=False, victim="cheapest",
         happens=(Reason.ESTIMATED,)),
    Case("recompute, cache in the tiers", "recompute", 128, 512, block_size=8, budget=16,
         rest=(("skip_limit", 2),), happens=(Reason.SAVED, Reason.LOADED)),
    Case("static batch, swap", "swap", 64, 1024, block_size=8, budget=24, mode="static"),
    Case("static batch, dropped rows", "swap", 512, 0, budget=9, mode="static_dropped",
         policy="priority", rest=(("priority_order", "high_first"),)),
    Case("whole prompts only", "swap", 64, 512, block_size=8, budget=64, policy="longest_prefix",
         rest=(("enable_chunked_prefill", False), ("overtake_limit", 1))),
    Case("the disk is full", "swap", 64, 1024, block_size=8, budget=24, broken=True,
         happens=(Reason.LOST,)),
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(lone: LLM) -> list[list[Bits]]:
    """Each answer by itself."""
    return [alone(lone, job.token_ids, job.params) for job in JOBS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_moves_the_bits_are_the_same(
    model: str, backend: str, undisturbed: list[list[Bits]], case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """R98, R100, C25: twice over, so that the second time finds prefixes in the tiers. Requests
    come while others run, and somebody is sent away every few steps."""
    nbytes = kernels_of(backend).kv_bytes_per_token(
        num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM
    )
    settings: dict[str, Any] = {
        "max_num_batched_tokens": case.budget,
        "enable_prefix_caching": case.caching,
        "preemption_mode": case.means,
        "scheduling_policy": case.policy,
        "victim_policy": case.victim,
        "batching_mode": case.mode,
        "ram_tier_memory": case.ram * nbytes,
        "file_tier_memory": case.file * nbytes,
        **dict(case.rest),
    }
    llm = LLM(
        model,
        max_model_len=128,
        num_kv_blocks=case.pool // case.block_size,
        block_size=case.block_size,
        **settings,
        **backend_settings(backend),
    )
    scheduler = llm._engine.core.scheduler
    if case.broken:
        monkeypatch.setattr("octavo.worker.tiers.os.pwrite", full_disk)

    def disturb(step: int) -> None:
        if step % 9 == 7 and scheduler.running:
            scheduler.preempt(sorted(scheduler.running)[step % len(scheduler.running)])

    for _ in range(2):
        outputs = serve(llm, JOBS, disturb)
        for job, output, expected in zip(JOBS, outputs, undisturbed, strict=True):
            assert [bits(answer) for answer in output.outputs] == expected, job
    counts = scheduler.event_log.counts
    assert counts[Reason.PREEMPTED] > 3
    for reason in case.happens:
        assert counts[reason] > 0, reason
    llm.close()


def full_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_no_scope_learns_of_another(model: str, backend: str, lone: LLM) -> None:
    """C94: the same prompts under many salts, through the pool, RAM, the file and back: the number
    of cached tokens is what it would be if only one's own scope had ever asked anything."""
    nbytes = kernels_of(backend).kv_bytes_per_token(
        num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM
    )
    llm = LLM(
        model,
        max_model_len=128,
        num_kv_blocks=12,
        block_size=8,
        ram_tier_memory=80 * nbytes,
        file_tier_memory=2048 * nbytes,
        **backend_settings(backend),
    )
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    same = prompt(37)
    parted = same[:21] + prompt(11, 5)
    expected = [alone(lone, tokens, params) for tokens in (same, parted)]
    scopes = ["", "a", "b", "a ", "A", "\x00", "", "a", "b"]
    first_time: set[str] = set()
    for scope in scopes:
        for tokens, (answer,) in zip((same, parted), expected, strict=True):
            (output,) = serve(llm, [Job(tokens, params, scope=scope)])
            assert bits(output.outputs[0]) == answer
            if scope not in first_time:
                own = 21 if tokens is parted else 0
                assert output.num_cached_tokens <= own, f"{scope!r} was told of another scope"
            else:
                assert output.num_cached_tokens >= 24
        first_time.add(scope)
    counts = llm._engine.core.scheduler.event_log.counts
    assert counts[Reason.LOADED] > 0
    llm.close()
