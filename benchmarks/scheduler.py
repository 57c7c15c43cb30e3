"""What scheduling costs: microseconds per step and per running request, in steady decode (R21).

    PYTHONPATH=src python benchmarks/scheduler.py

The executor is left out: results are made up front, so that only schedule() and
update_from_output() are timed.
"""

from __future__ import annotations

import argparse
import statistics
import time

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.messages import SampledToken, SchedulerOutput, StepResult
from octavo.request import Request
from octavo.sampling_params import SamplingParams

PROMPT_TOKENS = 100
EOS_TOKEN_IDS = (2, 0)


SIZES = ((1, 0), (16, 0), (256, 0), (256, 10_000), (1024, 0), (2048, 0))
POLICIES = ("fcfs", "priority", "longest_prefix", "fair_share")


def make_scheduler(num_running: int, num_waiting: int, num_steps: int, policy: str) -> Scheduler:
    """A scheduler with `num_running` decodes, behind which others wait."""
    max_tokens = num_steps + 100
    blocks_each = (PROMPT_TOKENS + max_tokens) // 16 + 1
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=1 << 20,
            scheduling_policy=policy,
            skip_limit=4,
        ),
        CacheConfig(block_size=16),
        num_blocks=(num_running + 1) * blocks_each,
        max_model_len=100_000,
    )
    for request_id in range(num_running + num_waiting):
        # Lengths differ, so that in each step one request in 16 needs a block.
        prompt = [request_id * 7 + i for i in range(PROMPT_TOKENS - request_id % 16)]
        scheduler.add(
            Request(
                request_id,
                prompt,
                SamplingParams(),
                max_tokens=max_tokens,
                eos_token_ids=EOS_TOKEN_IDS,
                priority=1,
                tenant=str(request_id % 100),
            )
        )
    return scheduler


def time_turnover(policy: str, num_waiting: int, num_steps: int) -> float:
    """Median microseconds of a step in which one of 64 ends and the next is admitted.

    Prompts of 500 tokens share 0 to 480 tokens with what is cached.
    """
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096, scheduling_policy=policy),
        CacheConfig(block_size=16),
        num_blocks=10_000,
        max_model_len=100_000,
    )
    for request_id in range(num_waiting + 64 + num_steps):
        prompt = [*range(request_id % 31 * 16), *(request_id * 1000 + i for i in range(500))][:500]
        max_tokens = 64 + request_id if request_id < 64 else 64
        params = SamplingParams(ignore_eos=True)
        tenant = str(request_id % 100)
        scheduler.add(Request(request_id, prompt, params, max_tokens=max_tokens, tenant=tenant))
    for _ in range(70):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, answer(plan))
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        times.append(time.perf_counter() - start)
        scheduler.update_from_output(plan, answer(plan))
    return statistics.median(times) * 1e6


def answer(plan: SchedulerOutput) -> StepResult:
    """A token for each sampling row."""
    tokens = [SampledToken(entry.row, 1000) for entry in plan.scheduled if entry.samples]
    return StepResult(plan.step, tuple(tokens))


def time_steps(scheduler: Scheduler, num_steps: int) -> tuple[float, float]:
    """Median microseconds of schedule() and of update_from_output()."""
    scheduler.update_from_output(plan := scheduler.schedule(), answer(plan))
    planning, updating = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planning.append(time.perf_counter() - start)
        result = answer(plan)
        start = time.perf_counter()
        scheduler.update_from_output(plan, result)
        updating.append(time.perf_counter() - start)
    return statistics.median(planning) * 1e6, statistics.median(updating) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    print("Steady decode:")
    print(f"{'policy':>15} {'running':>8} {'waiting':>8} {'schedule':>10} {'update':>10} "
          f"{'us/step':>9} {'us/request':>11}")  # fmt: skip
    for policy in POLICIES:
        for num_running, num_waiting in SIZES:
            scheduler = make_scheduler(num_running, num_waiting, args.steps, policy)
            planning, updating = time_steps(scheduler, args.steps)
            per_request = (planning + updating) / num_running
            print(
                f"{policy:>15} {num_running:>8} {num_waiting:>8} {planning:>10.1f} "
                f"{updating:>10.1f} {planning + updating:>9.1f} {per_request:>11.2f}"
            )
    print("schedule() while one of 64 ends in each step and one of those that wait is admitted:")
    for policy in POLICIES:
        for num_waiting in (100, 1000, 10_000):
            micros = time_turnover(policy, num_waiting, 100)
            print(f"{policy:>15} {64:>8} {num_waiting:>8} {micros:>10.1f}")


if __name__ == "__main__":
    main()
