"""Static against continuous batching, paged against reserved memory, in one scheduler (R14-R17).

    PYTHONPATH=src python benchmarks/batching.py

Counts steps, without a model: where decoding is bound by reading the weights, a step costs about
the same whatever its batch, so the ratio of steps is that of throughput. 320 requests, all there at
the start, 32 slots; the means are alike and the spread of lengths differs.
"""

from __future__ import annotations

import random

from octavo.sim.timeline import Stage

NUM_REQUESTS = 320
SPREADS = {
    "all 250 tokens": [(250, 251)],
    "200 to 300": [(200, 301)],
    "10 to 490": [(10, 491)],
    "mixed 40/40/20": [(10, 100)] * 4 + [(100, 500)] * 4 + [(500, 1000)] * 2,
    "one of 16 is long": [(20, 120)] * 15 + [(2500, 3500)],
}


def lengths(spread: list[tuple[int, int]]) -> list[int]:
    """Output tokens of each request."""
    rng = random.Random(17)
    found = [rng.randrange(*spread[i % len(spread)]) for i in range(NUM_REQUESTS)]
    rng.shuffle(found)
    return found


def play(outputs: list[int], **settings: object) -> tuple[int, float, float]:
    """Steps to the end, share of slots used, mean step in which a request starts."""
    stage = Stage(audit=False, max_num_batched_tokens=1 << 16, **settings)
    for number, length in enumerate(outputs):
        stage.add(str(number), 4, length)
    stage.run()
    starts = {}
    for step, part in enumerate(stage.steps):
        for name in part:
            starts.setdefault(name, step)
    num_steps = len(stage.steps)
    used = sum(outputs) / (num_steps * 32)
    return num_steps, used, sum(starts.values()) / len(starts)


def main() -> None:
    print(f"{'lengths':>20} {'batching':>16} {'steps':>7} {'slots used':>11} {'mean start':>11} "
          f"{'ratio':>6}")  # fmt: skip
    for name, spread in SPREADS.items():
        outputs = lengths(spread)
        base = None
        for mode in ("continuous", "static_dropped"):
            steps, used, start = play(
                outputs, num_blocks=20_000, max_num_seqs=32, batching_mode=mode
            )
            base = base or steps
            print(f"{name:>20} {mode:>16} {steps:>7} {used:>11.1%} {start:>11.0f} "
                  f"{steps / base:>5.1f}x")  # fmt: skip
    print("the mixed lengths in the memory of 8 requests of 1,024 tokens (512 blocks):")
    outputs = lengths(SPREADS["mixed 40/40/20"])
    for kind in ("paged", "contiguous"):
        steps, used, start = play(
            outputs,
            num_blocks=512,
            max_model_len=1024,
            max_num_seqs=64,
            kv_reservation=kind,
            enable_prefix_caching=False,
        )
        print(f"{kind:>20} {steps:>24} steps, mean start {start:.0f}")


if __name__ == "__main__":
    main()
