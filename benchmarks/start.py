"""From a new process to its first token: a start that packs the weights, and those that map them.

    python benchmarks/start.py [--model MODEL] [--repeats 7] [-- FLAGS OF octavo generate]

The page cache is warm: the model file was read before. For each kind of start, in turns: the median
and the extremes of the wall clock, the processor's time, and the memory that was resident at the
end (the file mapping of packed weights counts in it).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple


class Start(NamedTuple):
    """One process."""

    seconds: float
    """Until the first byte of the answer."""
    user: float
    system: float
    resident: int
    """Bytes at most."""


def start(model: str, flags: list[str], environment: dict[str, str]) -> Start:
    command = [sys.executable, "-m", "octavo", "generate", model, "--prompt", "hi"]
    command += ["--max-tokens", "4", *flags]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Start(seconds, usage.ru_utime, usage.ru_stime, usage.ru_maxrss << 10)


def row(name: str, starts: list[Start]) -> str:
    seconds = [each.seconds for each in starts]
    middle = [statistics.median(column) for column in zip(*starts, strict=True)]
    return (
        f"{name:28} {middle[0]:6.2f}  {min(seconds):6.2f} - {max(seconds):5.2f}"
        f"  {middle[1]:6.2f} {middle[2]:6.2f}  {middle[3] / 2**20:8,.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("flags", nargs="*", help="flags of octavo generate, after --")
    args = parser.parse_args()
    kinds = {
        "packs, keeps nothing": ["--packed-cache", "off"],
        "maps what was kept": ["--packed-cache", "map"],
        "copies what was kept": ["--packed-cache", "copy"],
        "default (auto)": [],
    }
    with tempfile.TemporaryDirectory() as empty:
        # Models come from the cache as it is; packed weights are this run's own.
        environment = {**os.environ, "OCTAVO_PACKED": empty}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
        first = start(args.model, args.flags, environment)
        found: dict[str, list[Start]] = {name: [] for name in kinds}
        for _ in range(args.repeats):
            for name, flags in kinds.items():
                found[name].append(start(args.model, [*flags, *args.flags], environment))
    print(f"{args.model}: seconds to the first token, {args.repeats} starts of each kind in turns")
    print(f"{'':28} median    least - most     user system  MiB resident")
    print(row("first of all, packs, keeps", [first]))
    for name, starts in found.items():
        print(row(name, starts))


if __name__ == "__main__":
    main()
