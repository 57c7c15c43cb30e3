"""When cached prefixes are written to the file in which they outlive the engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ..core.scheduler import Scheduler
from ..durable import Postponed
from ..worker.executor import Executor

logger = logging.getLogger("octavo")

REST = 20.0
"""A write is followed by a rest of so many times its length: a large file costs 5 % of the time."""


class PrefixKeeper:
    """Without a file it does nothing. `now` is monotonic, in seconds."""

    def __init__(self, scheduler: Scheduler, executor: Executor, now: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._now = now
        self._path: str | None = None
        self._seconds = self.due = math.inf
        """`due`: when a busy engine is to write, too."""
        self._rested = -math.inf
        self._version = 0
        """Of the tree of prefixes, as it is in the file."""

    def begin(self, path: str, seconds: float) -> None:
        """Begin with the prefixes of a file, and keep them there; every so many seconds while the
        engine is busy, unless that is 0."""
        self._scheduler.import_prefixes(self._executor.load_prefixes(path))
        self._path, self._seconds = path, seconds or math.inf
        self.due = self._now() + self._seconds
        self._version = self._scheduler.kv.cache.version

    def keep(
        self, *, at_once: bool = False, go_on: Callable[[], bool] = lambda: True
    ) -> float | None:
        """Write what has changed, unless the last write is not long enough ago, or `go_on` stops
        it: then returns the seconds until the next may be; else None."""
        start, version = self._now(), self._scheduler.kv.cache.version
        if self._path is None or version == self._version:
            return None
        if start < self._rested and not at_once:
            return self._rested - start
        try:
            self._executor.save_prefixes(self._path, self._scheduler.kv.export_prefixes(), go_on)
        except Postponed:
            return 0.0
        except (OSError, MemoryError) as error:
            logger.error("prefix cache not kept in %s: %s", self._path, error)
        self._version, end = version, self._now()
        self._rested = end + REST * (end - start)
        self.due = max(self._rested, end + self._seconds)
        return None
