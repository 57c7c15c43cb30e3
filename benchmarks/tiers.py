"""What memory below the KV pool costs, and what the event log does.

    PYTHONPATH=src python benchmarks/tiers.py [log] [moves] [file]

log: CPU time of scheduling with the event log and with one that records nothing, in turns, in a
run that preempts, swaps and evicts all the time. moves: bytes per second to and from RAM and the
file tier (whose pages the system caches). file: writing and reading the file of kept prefixes.
K/V have the shape of SmolLM2-135M in bfloat16 on the cpu backend.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import tracemalloc
from pathlib import Path
from time import perf_counter, thread_time

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.event_log import EventLog, Reason
from octavo.core.scheduler import Scheduler
from octavo.kernels.api import load_backend
from octavo.messages import KeptRun, Moved, SampledToken, StepResult, Timing, Transfer
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.worker.prefix_file import load_prefixes, save_prefixes
from octavo.worker.tiers import Tiers

NUM_BLOCKS = 256
TIMING = Timing(64, 10_000, (Moved("store", 0, 1, 50), Moved("load", 0, 1, 50)))


class NoLog(EventLog):
    """The same without a memory."""

    def record(self, reason: Reason, request_id: int | None, *detail: int | str) -> None:
        pass


def run(event_log: EventLog) -> tuple[float, int]:
    """CPU seconds and steps of 400 requests in a pool that is too small for those that run."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=32, preemption_mode="auto", skip_limit=2),
        CacheConfig(block_size=16),
        num_blocks=200,
        max_model_len=4096,
        num_slots=(200, 200),
        event_log=event_log,
    )
    for i in range(400):
        prompt = [i % 7] * 40 + list(range(i * 100, i * 100 + 60))
        scheduler.add(Request(i, prompt, SamplingParams(), max_tokens=60))
    start, num_steps = thread_time(), 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        sampled = tuple(SampledToken(entry.row, 7) for entry in plan.scheduled if entry.samples)
        scheduler.update_from_output(plan, StepResult(plan.step, sampled, timing=TIMING))
        num_steps += 1
    return thread_time() - start, num_steps


def log() -> None:
    times: dict[str, list[float]] = {"with": [], "without": []}
    run(EventLog())
    for _ in range(7):
        kept = EventLog()
        seconds, num_steps = run(kept)
        times["with"].append(seconds)
        times["without"].append(run(NoLog())[0])
    num_events = sum(kept.counts.values())
    with_log, without = (statistics.median(times[name]) for name in ("with", "without"))
    share = (with_log - without) / without
    print(f"event log: {num_events:,} events in {num_steps:,} steps, {with_log * 1e3:.0f} ms with, "
          f"{without * 1e3:.0f} ms without: {share:+.1%}")  # fmt: skip
    start = thread_time()
    for i in range(100_000):
        kept.record(Reason.PREEMPTED, i, i, i + 1)
    print(f"  one event: {(thread_time() - start) * 10:.2f} us")
    tracemalloc.start()
    full = EventLog()
    for i in range(20_000):
        full.record(Reason.PREEMPTED, i, 1000 + i, 2000 + i)
    print(f"  {len(full):,} events at most: {tracemalloc.get_traced_memory()[0] / 2**20:.1f} MiB")


def make_tiers(num_ram: int, num_file: int) -> Tiers:
    pool = load_backend("cpu").allocate_kv_cache(
        num_layers=30, num_blocks=NUM_BLOCKS, block_size=16, num_kv_heads=3, head_dim=64
    )
    nbytes = pool.block_nbytes
    config = CacheConfig(ram_tier_memory=num_ram * nbytes, file_tier_memory=num_file * nbytes)
    return Tiers(config, pool)


def moves() -> None:
    for name, num_ram, num_file in (("RAM", NUM_BLOCKS, 0), ("file", 0, NUM_BLOCKS),
                                    ("RAM full", NUM_BLOCKS // 2, NUM_BLOCKS)):  # fmt: skip
        tiers = make_tiers(num_ram, num_file)
        for _ in range(3):  # the first touches memory that the system has not given yet
            for kind in ("store", "load"):
                start = perf_counter()
                tiers.move([Transfer(kind, i, i) for i in range(NUM_BLOCKS)])
                seconds = perf_counter() - start
                rate = NUM_BLOCKS * tiers.block_nbytes / seconds / 1e9
                print(f"{name}, {kind}: {seconds / NUM_BLOCKS * 1e6:.0f} us a block of "
                      f"{tiers.block_nbytes:,} bytes, {rate:.2f} GB/s")  # fmt: skip
        tiers.close()


def file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "kept")
        tiers = make_tiers(NUM_BLOCKS, 0)
        numbers = [tuple(range(i * 256, i * 256 + 256)) for i in range(NUM_BLOCKS // 16)]
        runs = [KeptRun("", -1, x, tuple(i // 16 for i in x[::16]), False) for x in numbers]
        for what, call in (
            ("written", lambda: save_prefixes(path, runs, "mark", tiers, go_on=lambda: True)),
            ("read", lambda: load_prefixes(path, "mark", tiers)),
        ):
            start = perf_counter()
            call()
            seconds = perf_counter() - start
            size = Path(path).stat().st_size
            print(f"file of {size / 2**20:.0f} MiB {what} in {seconds:.2f} s: "
                  f"{seconds * 2**30 / size:.1f} s a GiB")  # fmt: skip


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["log", "moves", "file"]:
        {"log": log, "moves": moves, "file": file}[wanted]()
