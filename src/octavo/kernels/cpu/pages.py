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
        text = rollup.read_text()
    except OSError:
        text = ""
    found = dict(re.findall(r"^(AnonHugePages|FilePmdMapped):\s+(\d+) kB", text, re.MULTILINE))
    if "AnonHugePages" not in found:
        return "not known: the system does not say"
    in_files = int(found.get("FilePmdMapped", 0)) // 1024
    if mib := int(found["AnonHugePages"]) // 1024 + in_files:
        return f"{mib:,} MiB" + (f", {in_files:,} of them of mapped files" if in_files else "")
    try:
        mode = re.search(r"\[(\w+)\]", switch.read_text())
    except OSError:
        mode = None
    return f"none: transparent_hugepage is {mode[1]}" if mode else "none"
