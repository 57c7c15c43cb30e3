"""octavo scenario: worked examples on the real scheduler, drawn and checked; no model needed."""

from __future__ import annotations

import argparse
import sys

from ..errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """List the scenarios, or run one (or all): exit code 1 if an expectation fails."""
    from ..sim.scenarios import SCENARIOS

    if args.action == "list":
        width = max(map(len, SCENARIOS))
        for name, scenario in SCENARIOS.items():
            print(f"{name:{width}}  {scenario.title}")
        return 0
    names = list(SCENARIOS) if args.name in (None, "all") else [args.name]
    num_failures = 0
    for name in names:
        if name not in SCENARIOS:
            raise ConfigError("NAME", name, f"one of {', '.join(SCENARIOS)}, or all")
        scenario = SCENARIOS[name]
        stage = scenario.play()
        print("\n".join([f"{name}: {scenario.title}", *stage.lines]))
        num_failures += len(stage.failures)
    if num_failures:
        print(f"octavo: {num_failures} expectations failed", file=sys.stderr)
    return 1 if num_failures else 0
