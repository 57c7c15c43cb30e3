"""Worked examples of batching, paging and preemption: run, drawn, and checked.

Each is a function from nothing to the stage on which it played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..core.event_log import Reason
from ..messages import ModelCosts, Moved, Timing
from ..request import Status
from .timeline import Stage, tokens


class Scenario(NamedTuple):
    """A worked example."""

    title: str
    play: Callable[[], Stage]


def static_batch() -> Stage:
    """R13: A, B and C with 50, 2000 and 100 output tokens; D comes too late."""
    stage = Stage(num_blocks=400, max_num_seqs=3, batching_mode="static")
    lengths = {"A": 50, "B": 2000, "C": 100}
    for name, length in lengths.items():
        stage.add(name, 8, length)
    stage.step()
    stage.add("D", 8, 10)
    stage.run()
    num_steps = sum("B" in part for part in stage.steps)
    stage.expect("steps until the batch ends", num_steps, 2000)
    used = sum(lengths.values()) / (3 * num_steps)
    stage.expect("slots used", round(used, 3), 0.358)
    computed = sum("A" in part for part in stage.steps)
    stage.expect("steps in which A is computed, most of them as padding", computed, 2000)
    starts = next(i for i, part in enumerate(stage.steps, 1) if "D" in part)
    stage.expect("D, which came in step 2, starts in step", starts, 2001)
    return stage


def continuous() -> Stage:
    """R18: five requests, room for three."""
    stage = Stage(max_num_seqs=3)
    for name, length in zip("ABCDE", (2, 6, 4, 9, 9), strict=True):
        stage.add(name, 8, length)
    stage.run()
    stage.expect("batches", ", ".join(stage.sets()[:4]), "ABC, BCD, BDE, DE")
    return stage


def chunked_1000() -> Stage:
    """R109: a prompt of 1000 tokens in chunks of 256, beside two decodes."""
    stage = Stage(max_num_batched_tokens=258)
    stage.add("A", 4, 20)
    stage.add("B", 4, 20)
    stage.step()
    stage.add("C", 1000, 8)
    stage.run(until=6)
    chunks = [part["C"] for part in stage.steps[1:5]]
    wanted = [(0, 256), (256, 512), (512, 768), (768, 1000)]
    stage.expect("chunks of C", chunks, wanted)
    beside = all({"A", "B"} <= part.keys() for part in stage.steps)
    stage.expect("A and B get their token in each of these steps", beside, True)
    stage.expect("step 5 after C came: all three decode", sorted(stage.steps[5]), ["A", "B", "C"])
    return stage


def priority_vip() -> Stage:
    """R95: VIP 3, normal 2, background 1; the higher goes first."""
    stage = Stage(max_num_seqs=1, scheduling_policy="priority", priority_order="high_first")
    for name, priority in (("A", 2), ("B", 3), ("C", 1)):
        stage.add(name, 8, 3, priority=priority)
    stage.run()
    stage.expect("order of A (2), B (3), C (1)", stage.order(), "BAC")
    return stage


def preempt_500_10_50() -> Stage:
    """R97: A, B and C have generated 500, 10 and 50 tokens when D, more important, comes."""
    stage = Stage(
        num_blocks=60,
        scheduling_policy="priority",
        victim_policy="most_generated",
        enable_prefix_caching=False,
    )
    for name, at in (("A", 0), ("C", 450), ("B", 490)):
        stage.run(until=at) if at else None
        stage.add(name, 16, 600, priority=2)
    stage.run(until=500)
    generated = {name: stage.requests[name].num_output_tokens for name in "ABC"}
    stage.expect("tokens generated", generated, {"A": 500, "B": 10, "C": 50})
    d = stage.add("D", 400, 5, priority=1)
    part = stage.step()
    stage.expect("who yields", [n for n in "ABC" if stage.requests[n].num_preemptions], ["A"])
    stage.expect("who runs in that step", "".join(sorted(part)), "BCD")
    stage.run()
    stage.expect("D ends", d.status, Status.FINISHED)
    num_tokens = stage.requests["A"].num_output_tokens
    stage.expect("A goes on later and keeps what it had; tokens in the end", num_tokens, 600)
    return stage


LLAMA_8B = ModelCosts(
    block_nbytes=16 * 32 * 2 * 8 * 128 * 2,
    flops_per_token=2 * 8_030_000_000,
    bytes_per_us=(25_000.0, 1_000.0),
    flops_per_us=312_000_000.0 / 2,
)
"""Llama-3-8B in bfloat16 on a device of 312 TFLOP/s, half of which a prefill gets, over PCIe."""


def swap_vs_recompute() -> Stage:
    """R98-R102: move the K/V out and in again, or compute them again? By length, then by cost."""
    stage = Stage(preemption_mode="threshold", num_slots=(64, 0), costs=LLAMA_8B)
    stage.say("threshold: below 128 tokens it is computed again, else swapped")
    for name, length in (("A", 127), ("B", 128)):
        request = stage.add(name, length, 20)
        stage.step()
        stage.scheduler.preempt(request.request_id)
        num_kept = 0 if request.swapped is None else request.swapped.num_tokens
        stage.expect(f"tokens of {name} in the tier", num_kept, {"A": 0, "B": 128}[name])
        stage.run()
    stage.say(
        "auto, by the book: 512 tokens are 64 MiB, 25 GB/s each way; or 8.2 TFLOP of a prefill"
    )
    auto = Stage(
        preemption_mode="auto",
        num_slots=(64, 0),
        costs=LLAMA_8B,
        max_num_batched_tokens=258,
        enable_prefix_caching=False,
    )
    auto.lines = stage.lines
    auto.failures = stage.failures
    auto.add("C", 8, 40)
    auto.add("D", 8, 40)
    auto.step()
    request = auto.add("E", 511, 40)
    while request.num_computed_tokens < 512:
        auto.step()
    auto.scheduler.preempt(request.request_id)
    estimates = [e.detail for e in auto.scheduler.event_log if e.reason is Reason.ESTIMATED]
    auto.expect("us to swap, us to recompute", estimates[-1], (5369, 52710))
    auto.expect("E is swapped", request.swapped is not None, True)
    part = auto.step()
    auto.expect("E goes on without recomputing", part["E"], (512, 513))
    auto.expect("tokens computed twice", auto.scheduler.stats().recomputed_tokens, 0)
    auto.say("measured: others are on the bus, too, and a block takes 2 ms each way")
    moved = (Moved("store", 0, 1, 2000), Moved("load", 0, 1, 2000))
    auto.timing = Timing(256, 256 * 103, moved)
    auto.run(until=len(auto.steps) + 30)
    auto.timing = None
    auto.scheduler.preempt(request.request_id)
    estimates = [e.detail for e in auto.scheduler.event_log if e.reason is Reason.ESTIMATED]
    auto.expect("us to swap, us to recompute", estimates[-1], (135_953, 543 * 103))
    auto.expect("E is swapped", request.swapped is not None, False)
    first = len(auto.steps)
    auto.run(until=first + 3)
    chunks = [part.get("E") for part in auto.steps[first:]]
    auto.expect("E is computed again in chunks", chunks, [(0, 256), (256, 512), (512, 544)])
    beside = {"".join(sorted(set(part) - {"E"})) for part in auto.steps[first:]}
    auto.expect("beside them the others go on in every step", beside, {"CD"})
    auto.run()
    return auto


def radix_abc() -> Stage:
    """R113: three prompts share six blocks; each adds one of its own."""
    stage = Stage(block_size=4)
    system, shots = tokens(12, 100), tokens(12, 101)
    stage.add("S", system, 1)
    stage.run()
    for i, name in enumerate("ABC"):
        stage.add(name, [*system, *shots, *tokens(4, 102 + i)], 1)
        stage.run()
    cache = stage.scheduler.kv.cache
    nodes = list(cache.nodes())
    stage.say("the tree: root")
    for node in sorted(nodes, key=lambda node: node.block_ids):
        depth, at = 0, node.parent
        while at is not None:
            depth, at = depth + 1, at.parent
        stage.say(f"{'    ' * depth}blocks {node.block_ids}")
    hits = {name: stage.requests[name].num_cached_tokens for name in "ABC"}
    stage.expect("tokens found in the cache", hits, {"A": 12, "B": 24, "C": 24})
    edges = sorted(node.block_ids for node in nodes)
    stage.expect("blocks by node", edges, [[0, 1, 2], [3, 4, 5], [6], [7], [8]])
    return stage


def slot_137() -> Stage:
    """R27: a request that holds blocks 5, 8 and 12; where is the K/V of position 25?"""
    stage = Stage(
        block_size=16, enable_prefix_caching=False, max_num_batched_tokens=16, audit=False
    )
    pool = stage.scheduler.kv.pool
    request = stage.add("A", 40, 2)
    others = []
    for count in (5, 2, 3):
        others += pool.allocate(count) or []
        stage.step()
    stage.say(f"others hold blocks {others}")
    stage.expect("block table of A", request.block_ids, [5, 8, 12])
    virtual, offset = divmod(25, 16)
    slot = request.block_ids[virtual] * 16 + offset
    stage.say(f"position 25 = virtual block {virtual}, offset {offset}")
    stage.say(f"virtual block {virtual} = physical block {request.block_ids[virtual]}")
    stage.expect("slot of position 25", slot, 137)
    pool.release(others)
    stage.scheduler.finish(request.request_id, "abort")
    return stage


def no_admission_after_preemption() -> Stage:
    """R105: a step that preempts starts nobody, though a small request would fit."""
    stage = Stage(num_blocks=4, block_size=4, enable_prefix_caching=False)
    stage.add("A", 8, 8)
    stage.add("B", 7, 8)
    stage.step()
    stage.add("C", 1, 1)
    part = stage.step()
    stage.expect("who runs in the step in which B yields", sorted(part), ["A"])
    stage.expect("B is back in the queue", stage.requests["B"].status, Status.PREEMPTED)
    left = stage.scheduler.kv.num_available
    stage.expect("C needs a block, and some are left", left >= 1, True)
    log = stage.scheduler.event_log
    reasons = [event.reason for event in log if event.step == 2]
    stage.expect("the reason is logged", Reason.PREEMPTION_STEP in reasons, True)
    stage.run()
    return stage


SCENARIOS = {
    "static-batch": Scenario("50, 2000 and 100 tokens in a static batch", static_batch),
    "continuous": Scenario("five requests, room for three", continuous),
    "chunked-1000": Scenario("a long prompt in chunks beside two decodes", chunked_1000),
    "priority-vip": Scenario("the important one first", priority_vip),
    "preempt-500-10-50": Scenario("who yields to a more important request", preempt_500_10_50),
    "swap-vs-recompute": Scenario(
        "what a preempted request costs, moved or computed again", swap_vs_recompute
    ),
    "radix-abc": Scenario("three prompts with a shared beginning, as a tree", radix_abc),
    "slot-137": Scenario("from a position to its slot, by the block table", slot_137),
    "no-admission-after-preemption": Scenario(
        "a step that preempts starts nobody", no_admission_after_preemption
    ),
}
