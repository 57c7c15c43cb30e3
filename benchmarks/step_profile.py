"""Where a step's time goes, by kind of op, against the floor of this machine in the same run.

    python benchmarks/step_profile.py [--model smollm2-135m] [--isa amx] [--threads 2] [--cpu-time]

Decodes of 1, 16 and 64 requests at 256 keys, and prompts of 512 and 4,096 tokens. The model's own
Python runs with a clock around each op; of several steps the least time of each call counts. The
floor of a stage is the larger of its FLOPs at the peak rate and its bytes at the bandwidth
(benchmarks/intensity.py counts them). Below the table: the whole step as the server runs it, by
one native call, without and with the pruned last layer.

--cpu-time counts the time of this thread instead of the clock's, for one thread on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from intensity import Work, stages
from machine import Clock, Speed, measure

from octavo.checkpoint import Checkpoint, ModelConfig
from octavo.kernels.api import KVCache, Linear
from octavo.kernels.cpu import CpuKernels, available_cpus, make_kernels
from octavo.models.batch import ForwardBatch, trace_batches
from octavo.models.registry import build_model
from octavo.weights.sources import open_checkpoint

BLOCK_SIZE = 16
STEPS = {
    **{f"decode of {n} at 256": ([1] * n, [256] * n) for n in (1, 16, 64)},
    **{f"prompt of {n}": ([n], [n]) for n in (512, 4096)},
}
"""Query rows and keys of each request."""
BUDGET = 1.5
"""Seconds for the steps of one kind."""


class TimedOps:
    """Stands in for the native ops: notes how long each call takes."""

    def __init__(self, ops: Any, config: ModelConfig, clock: Clock) -> None:
        self._ops = ops
        self._clock = clock
        self._stage_of_columns = _stages_of_columns(config)
        self.calls: list[tuple[str, float]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        op = getattr(self._ops, name)

        def timed(*args: Any) -> None:
            start = self._clock()
            op(*args)
            self.calls.append((self._stage(name, args), self._clock() - start))

        return timed

    def _stage(self, name: str, args: tuple[Any, ...]) -> str:
        if name.startswith("linear"):
            weight: Linear = args[1]
            return self._stage_of_columns[weight.out_features, weight.in_features]
        return "attention" if name == "paged_attention" else name


def _stages_of_columns(config: ModelConfig) -> dict[tuple[int, int], str]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        (config.vocab_size, hidden): "lm_head",
        (2 * inner, hidden): "gate_up",
        (hidden, inner): "down",
        (hidden, query): "o_proj",
        (query + 2 * kv, hidden): "qkv",
    }


def make_batch(query_lens: list[int], seq_lens: list[int]) -> ForwardBatch:
    """Requests that stand at their ends, each with blocks of its own, each sampled greedily."""
    per_request = -(-max(seq_lens) // BLOCK_SIZE)
    table = np.arange(len(seq_lens) * per_request, dtype=np.int32).reshape(len(seq_lens), -1)
    parts = list(zip(query_lens, seq_lens, strict=True))
    positions = np.concatenate([np.arange(s - q, s) for q, s in parts])
    owners = np.repeat(np.arange(len(parts)), query_lens)
    slots = table[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    return ForwardBatch(
        input_ids=(1000 + positions).astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        query_start_loc=starts,
        seq_lens=np.array(seq_lens, np.int32),
        block_table=table,
        logits_indices=starts[1:] - 1,
        argmax_only=np.ones(len(parts), np.int32),
        sampled_positions=np.array(seq_lens, np.int32) - 1,
        sampled_start_loc=np.arange(len(parts) + 1, dtype=np.int32),
    )


def repeat(call: Callable[[], object]) -> None:
    """Twice at least, then until the budget is spent."""
    end = time.perf_counter() + BUDGET
    call()
    call()
    while time.perf_counter() < end:
        call()


def time_ops(
    ops: CpuKernels,
    forward: Callable[..., object],
    config: ModelConfig,
    clock: Clock,
) -> dict[str, float]:
    """Seconds by stage: the least of each call over several steps, added up."""
    native = ops._ops
    best: list[tuple[str, float]] = []

    def step() -> None:
        nonlocal best
        timed = TimedOps(native, config, clock)
        ops._ops = timed  # type: ignore[assignment]
        try:
            forward()
        finally:
            ops._ops = native
        old = best or timed.calls
        best = [(name, min(a, b)) for (name, a), (_, b) in zip(old, timed.calls, strict=True)]

    repeat(step)
    spent: dict[str, float] = defaultdict(float)
    for name, seconds in best:
        spent[name] += seconds
    return spent


def least(call: Callable[[], object], clock: Clock) -> float:
    best = float("inf")

    def once() -> None:
        nonlocal best
        start = clock()
        call()
        best = min(best, clock() - start)

    repeat(once)
    return best


def report(
    ops: CpuKernels,
    checkpoint: Checkpoint,
    speed: Speed,
    clock: Clock,
) -> None:
    config, longest = checkpoint.config, max(max(seq) for _, seq in STEPS.values())
    whole, pruned = (
        build_model(checkpoint, ops, max_model_len=longest, prune_last_layer=prune)
        for prune in (False, True)
    )
    cache: KVCache = ops.allocate_kv_cache(
        num_layers=config.num_hidden_layers,
        num_blocks=max(sum(-(-s // BLOCK_SIZE) for s in seq) for _, seq in STEPS.values()),
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    for block in range(cache.num_blocks):
        cache.fill_block(block, 0.5)
    replays = [ops.capture(model.forward, cache, trace_batches()) for model in (whole, pruned)]
    arena = ops.make_arena()
    for title, (query_lens, seq_lens) in STEPS.items():
        batch = make_batch(query_lens, seq_lens)

        def run(forward: Any, batch: ForwardBatch = batch) -> None:
            arena.reset()
            forward(batch, cache, arena)

        spent = time_ops(ops, lambda run=run: run(whole.forward), config, clock)
        work = stages(config, query_lens, seq_lens, width=np.dtype(ops.dtype).itemsize)
        print(f"\n{title}\n  {'stage':<12} {'ms':>8} {'share':>6} {'GFLOP/s':>8} {'GB/s':>6} "
              f"{'floor ms':>9} {'of floor':>9}")  # fmt: skip
        total, total_floor = sum(spent.values()), 0.0
        for name, one in work.items():
            rest = {op: t for op, t in spent.items() if op not in work}
            seconds = spent[name] if name in spent else sum(rest.values())
            total_floor += speed.floor(*one)
            print_row(name, seconds, total, one, speed.floor(*one))
        print("   ", ", ".join(f"{op} {t * 1e3:.2f}" for op, t in rest.items()))
        everything = Work(*(sum(counts) for counts in zip(*work.values(), strict=True)))
        print_row("all ops", total, total, everything, total_floor)
        times = [least(lambda run=run, f=f: run(f), clock) for f in replays]
        print(f"  one native call {times[0] * 1e3:.2f} ms, {total_floor / times[0]:.0%} of floor")
        change = times[1] / times[0] - 1
        print(f"  with the last layer pruned {times[1] * 1e3:.2f} ms ({change:+.1%})")


def print_row(name: str, seconds: float, total: float, work: Work, floor: float) -> None:
    print(f"  {name:<12} {seconds * 1e3:>8.2f} {seconds / total:>6.0%} "
          f"{work.flops / seconds / 1e9:>8.0f} {work.bytes / seconds / 1e9:>6.1f} "
          f"{floor * 1e3:>9.2f} {floor / seconds:>9.0%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--isa", help="instruction-set level; else the best")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-time", action="store_true", help="of this thread; wants --threads 1")
    args = parser.parse_args()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    ops = make_kernels(threads=args.threads, isa=args.isa, dtype=args.dtype)
    speed = measure(ops, clock)
    print(f"{args.model}, {ops.isa}, {args.dtype}, {args.threads} threads: peak "
          f"{speed.flops / 1e9:.0f} GFLOP/s, bandwidth {speed.bytes / 1e9:.1f} GB/s")  # fmt: skip
    report(ops, open_checkpoint(args.model), speed, clock)


if __name__ == "__main__":
    main()
