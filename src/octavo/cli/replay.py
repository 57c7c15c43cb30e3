"""octavo replay: run the scheduler over a recording and compare its decisions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def run(args: argparse.Namespace) -> int:
    """Exit code 0: identical; 1: a decision differs, or the file can't be played."""
    from ..trace.replay import replay_file

    outcome = replay_file(Path(args.file))
    what = f"{outcome.num_steps} steps, {outcome.num_requests} requests"
    if outcome.difference is not None:
        print(f"{what}: a decision differs in {outcome.difference}")
        return 1
    print(f"{what}: the same decisions")
    if outcome.truncated:
        print("octavo: the file ends in the middle of a line; what it has agrees", file=sys.stderr)
    return 0
