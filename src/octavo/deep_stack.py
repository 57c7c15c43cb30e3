"""Room for code of others that calls itself as often as a user's text says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

STACK_SIZE = 1 << 28
"""Bytes; memory is used only as far as need be. The longest chain that a grammar's text holds
(MAX_SOURCE_CHARS) takes less than half of it, and up to 16 times a usual stack."""

_LOCK = threading.Lock()


def in_deep_stack(work: Callable[[], Result]) -> Result:
    """Do it in a thread that can't overrun its stack: that would be the end of the process."""
    with _LOCK:  # the size is that of all threads which begin meanwhile
        before = threading.stack_size(STACK_SIZE)
        try:
            pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-deep")
            result = pool.submit(work)
        finally:
            threading.stack_size(before)
    with pool:
        return result.result()
