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


def make_scheduler(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler with `num_running` decodes, behind which others wait."""
    max_tokens = num_steps + 100
    blocks_each = (PROMPT_TOKENS + max_tokens) // 16 + 1
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=1 << 20),
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
            )
        )
    return scheduler


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
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print(f"{'running':>8} {'waiting':>8} {'schedule':>10} {'update':>10} {'us/step':>9} "
          f"{'us/request':>11}")  # fmt: skip
    for num_running, num_waiting in ((1, 0), (16, 0), (256, 0), (256, 5000)):
        scheduler = make_scheduler(num_running, num_waiting, args.steps)
        planning, updating = time_steps(scheduler, args.steps)
        per_request = (planning + updating) / num_running
        print(
            f"{num_running:>8} {num_waiting:>8} {planning:>10.1f} {updating:>10.1f} "
            f"{planning + updating:>9.1f} {per_request:>11.2f}"
        )


if __name__ == "__main__":
    main()
