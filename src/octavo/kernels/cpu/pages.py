"""Whether weights, KV pool and scratch memory lie on huge pages, for the start-up report."""

from __future__ import annotations

import re
from pathlib import Path

ROLLUP = Path("/proc/self/smaps_rollup")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def describe_huge_pages(rollup: Path = ROLLUP, switch: Path = SWITCH) -> str:
    """How much of this process's memory the system has put on 2 MiB pages; why, if none.

    The native library asks for them (madvise); nothing but speed depends on the answer.
    """
    try:
        found = re.search(r"^AnonHugePages:\s+(\d+) kB", rollup.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return "not known: the system does not say"
    if mib := int(found[1]) // 1024:
        return f"{mib:,} MiB"
    try:
        mode = re.search(r"\[(\w+)\]", switch.read_text())
    except OSError:
        mode = None
    return f"none: transparent_hugepage is {mode[1]}" if mode else "none"
