"""What scheduling costs, in CPU time (R21): steps, long prompts, the prefix cache, memory.

    PYTHONPATH=src python benchmarks/scheduler.py [decode|turnover|prompt|radix|memory ...]

The executor is left out: results are made up front, so that only schedule() and
update_from_output() are timed. CPU time of the thread, since a step of milliseconds on a shared
machine is interrupted, and the clock on the wall counts that. Medians; the interpreter's cyclic
garbage collector is on, and its share is printed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.radix_cache import RadixCache
from octavo.core.scheduler import Scheduler
from octavo.messages import SampledToken, SchedulerOutput, StepResult, Timing
from octavo.request import Request
from octavo.sampling_params import SamplingParams

PROMPT_TOKENS = 100
LONG_PROMPT_TOKENS = 32_768
NUM_NODES = 100_000
EOS_TOKEN_IDS = (2, 0)
TIMING = Timing(256, 10_000)
SIZES = tuple((running, waiting) for running in (1, 16, 256, 1024, 2048) for waiting in (0, 10_000))
POLICIES = ("fcfs", "priority", "longest_prefix", "fair_share")


def make_scheduler(policy: str, *, num_running: int, num_blocks: int) -> Scheduler:
    """With every feature on: ageing, overtaking limits, skipping, prefix cache, tiers, auto."""
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=1 << 20,
            scheduling_policy=policy,
            priority_ageing_steps=100,
            skip_limit=4,
            preemption_mode="auto",
        ),
        CacheConfig(block_size=16),
        num_blocks=num_blocks,
        max_model_len=100_000,
        num_slots=(num_blocks, num_blocks),
    )


def make_request(request_id: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(stop_token_ids=(3, 4), min_tokens=2),
        max_tokens=max_tokens,
        eos_token_ids=EOS_TOKEN_IDS,
        priority=request_id % 3,
        tenant=str(request_id % 100),
    )


def answer(plan: SchedulerOutput) -> StepResult:
    """A token for each sampling row, and what the step took."""
    tokens = [SampledToken(entry.row, 1000) for entry in plan.scheduled if entry.samples]
    return StepResult(plan.step, tuple(tokens), timing=TIMING)


def micros(call: Callable[[], object]) -> float:
    """CPU time of this thread that a call takes, less what asking for it takes."""
    start = thread_time()
    before = thread_time()
    call()
    after = thread_time()
    return (after - before - (before - start)) * 1e6


@contextmanager
def collector_share(seconds: list[float]) -> Iterator[None]:
    """Adds the CPU time of each run of the garbage collector to `seconds`."""
    started = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = thread_time()
        else:
            seconds.append(thread_time() - started)

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


def decode(num_steps: int) -> None:
    print(
        "Steady decode, medians in us of CPU time (gc/step: mean of the collector's share): aim at"
    )
    print("most 2.5 per running request and step")
    print(f"{'policy':>15} {'running':>8} {'waiting':>8} {'schedule':>9} {'update':>9} "
          f"{'us/step':>9} {'gc/step':>9} {'us/request':>11}")  # fmt: skip
    for policy in POLICIES:
        for num_running, num_waiting in SIZES:
            planning, updating, collecting = time_steps(policy, num_running, num_waiting, num_steps)
            per_request = (planning + updating) / num_running
            print(
                f"{policy:>15} {num_running:>8} {num_waiting:>8} {planning:>9.1f} {updating:>9.1f} "
                f"{planning + updating:>9.1f} {collecting:>9.1f} {per_request:>11.2f}"
            )


def time_steps(
    policy: str, num_running: int, num_waiting: int, num_steps: int
) -> tuple[float, float, float]:
    """Medians of schedule() and update_from_output(), mean of the collector in both."""
    max_tokens = num_steps + 100
    blocks_each = (PROMPT_TOKENS + max_tokens) // 16 + 1
    scheduler = make_scheduler(
        policy, num_running=num_running, num_blocks=(num_running + 1) * blocks_each
    )
    for request_id in range(num_running + num_waiting):
        # Lengths differ, so that in each step one request in 16 needs a block.
        prompt = [request_id * 7 + i for i in range(PROMPT_TOKENS - request_id % 16)]
        scheduler.add(make_request(request_id, prompt, max_tokens))
    scheduler.update_from_output(plan := scheduler.schedule(), answer(plan))
    planning, updating, collecting = [], [], list[float]()
    plans = [plan]
    for _ in range(num_steps):
        with collector_share(collecting):
            planning.append(micros(lambda: plans.append(scheduler.schedule())))
        plan = plans.pop()
        result = answer(plan)
        with collector_share(collecting):
            updating.append(micros(lambda: scheduler.update_from_output(plan, result)))  # noqa: B023
    share = sum(collecting) / num_steps * 1e6
    return statistics.median(planning), statistics.median(updating), share


def turnover(num_steps: int) -> None:
    print("schedule() while one of 64 ends in each step and one of those that wait is admitted,")
    print("us of CPU time; prompts of 500 tokens share 0 to 480 tokens with what is cached")
    for policy in POLICIES:
        for num_waiting in (100, 1000, 10_000):
            print(f"{policy:>15} {num_waiting:>8} waiting "
                  f"{time_turnover(policy, num_waiting, num_steps):>9.1f}")  # fmt: skip


def time_turnover(policy: str, num_waiting: int, num_steps: int) -> float:
    scheduler = make_scheduler(policy, num_running=64, num_blocks=10_000)
    for request_id in range(num_waiting + 64 + num_steps):
        prompt = [*range(request_id % 31 * 16), *(request_id * 1000 + i for i in range(500))][:500]
        scheduler.add(make_request(request_id, prompt, 64 + max(0, 64 - request_id)))
    times: list[float] = []
    plans: list[SchedulerOutput] = []
    for _ in range(70 + num_steps):
        times.append(micros(lambda: plans.append(scheduler.schedule())))
        plan = plans.pop()
        scheduler.update_from_output(plan, answer(plan))
    return statistics.median(times[70:])


def prompt(num_runs: int) -> None:
    print(f"A prompt of {LONG_PROMPT_TOKENS:,} tokens from creation to scheduled, ms of CPU time:")
    print("aim at most 1.5. A hit is found over 64 nodes, in a pool where others had been before")
    for policy in POLICIES:
        miss, hit = (statistics.median(times) for times in time_prompts(policy, num_runs))
        print(f"{policy:>15} miss {miss / 1e3:>6.2f} hit {hit / 1e3:>6.2f}")


def time_prompts(policy: str, num_runs: int) -> tuple[list[float], list[float]]:
    num_blocks = 6 * LONG_PROMPT_TOKENS // 16
    scheduler = make_scheduler(policy, num_running=64, num_blocks=num_blocks)
    num_added = 0

    def run(token_ids: list[int]) -> float:
        """One request, alone in the engine, until it is scheduled; then to its end."""
        nonlocal num_added
        plans: list[SchedulerOutput] = []

        def create() -> None:
            scheduler.add(make_request(num_added, token_ids, 1))
            plans.append(scheduler.schedule())

        took = micros(create)
        num_added += 1
        scheduler.update_from_output(plans[0], answer(plans[0]))
        assert not scheduler.has_unfinished()
        return took

    misses, hits = [], []
    for i in range(num_runs):
        first = 1_000_000 * (i + 1)
        token_ids = list(range(first, first + LONG_PROMPT_TOKENS))
        misses.append(run(token_ids))
        part = LONG_PROMPT_TOKENS // 64
        for end in range(part, LONG_PROMPT_TOKENS, part):  # others part from it: a node each
            run([*token_ids[:end], *range(end, end + 16)])
        again = [int(str(token_id)) for token_id in token_ids]  # equal, not the same objects
        hits.append(run(again))
    return misses, hits


def radix(num_runs: int) -> None:
    print(f"The tree at {NUM_NODES:,} nodes (one block each), us of CPU time:")
    cache = RadixCache(16)
    fill(cache)
    last = NUM_NODES - 1
    token_ids = [key(last), *range(15)] * 2
    rows = [
        ("look up a prompt of two blocks", lambda i: cache.match([*token_ids], 32)),
        ("look up one that is not there", lambda i: cache.match([-i - 1] * 32, 32)),
        ("insert two blocks", lambda i: cache.insert([-i - 1, *range(31)], [10**6 + 2 * i,
         10**6 + 2 * i + 1], pin=False)),
        ("evict a leaf (aim at most 30)", lambda i: cache.evict(1)),
    ]  # fmt: skip
    for name, call in rows:
        times = [micros(lambda i=i, call=call: call(i)) for i in range(num_runs * 100)]
        print(f"{name:>35} {statistics.median(times):>8.1f}, mean {statistics.mean(times):>8.1f}, "
              f"largest {max(times):>8.1f}")  # fmt: skip
    long = RadixCache(16)
    token_ids = list(range(LONG_PROMPT_TOKENS))
    block_ids = list(range(LONG_PROMPT_TOKENS // 16))
    part = LONG_PROMPT_TOKENS // 64
    inserting = micros(lambda: long.insert(token_ids, block_ids, pin=False))
    for end in range(part, LONG_PROMPT_TOKENS, part):
        long.insert([*token_ids[:end], *[-1] * 16], [*block_ids[: end // 16], 10**6 + end],
                    pin=False)  # fmt: skip
    again = [int(str(token_id)) for token_id in token_ids]
    looking = statistics.median(
        micros(lambda: long.match(again, LONG_PROMPT_TOKENS)) for _ in range(num_runs)
    )
    print(f"a prompt of {LONG_PROMPT_TOKENS:,} tokens: insert {inserting:.0f}, "
          f"look up over 64 nodes {looking:.0f}")  # fmt: skip


def key(index: int) -> int:
    return index * 7 + 1_000_000


def fill(cache: RadixCache) -> None:
    """100 first blocks, each with many others below."""
    for i in range(NUM_NODES - 100):
        token_ids = [key(i % 100), *range(15), key(i), *range(15)]
        cache.insert(token_ids, [i % 100, 100 + i], pin=False)


def memory(num_runs: int) -> None:
    num = 2000
    params = SamplingParams()
    tracemalloc.start()
    for num_tokens in (0, 1000):
        prompts = [list(range(1000 * i, 1000 * i + num_tokens)) for i in range(num)]
        scheduler = make_scheduler("fcfs", num_running=1, num_blocks=16)
        before = tracemalloc.get_traced_memory()[0]
        for i, token_ids in enumerate(prompts):
            request = Request(i, token_ids, params, max_tokens=1)
            scheduler.waiting.push(request, 0)
            scheduler.requests[i] = request
        each = (tracemalloc.get_traced_memory()[0] - before) / num
        print(f"memory of an idle request of {num_tokens} tokens: {each:.0f} bytes")
    for num_blocks in (1, 8):
        cache = RadixCache(16)
        before = tracemalloc.get_traced_memory()[0]
        for i in range(num):
            token_ids = [-i - 1, *range(16 * num_blocks - 1)]
            cache.insert(token_ids, [num_blocks * i + j for j in range(num_blocks)], pin=False)
        each = (tracemalloc.get_traced_memory()[0] - before) / num
        print(f"memory of a tree node of {num_blocks} blocks of 16 tokens: {each:.0f} bytes")
    tracemalloc.stop()


PARTS: dict[str, tuple[Callable[[int], None], int]] = {
    "decode": (decode, 100),
    "turnover": (turnover, 100),
    "prompt": (prompt, 7),
    "radix": (radix, 20),
    "memory": (memory, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"default: {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, help="how often each is measured")
    args = parser.parse_args()
    for name in args.parts or PARTS:
        measure, default = PARTS[name]
        measure(args.steps or default)


if __name__ == "__main__":
    main()
