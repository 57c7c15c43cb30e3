"""Cost without a clock: the lines of Python that some work runs, the memory that it leaves."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_steps(work: Callable[[], Any]) -> int:
    """Python lines that `work` runs: its cost, on any machine."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def memory_kept(work: Callable[[], Any]) -> int:
    """Bytes that are still held after `work`: what grows with length shows here."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
