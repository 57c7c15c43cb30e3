"""Kept prefixes are written as often as they change, but not all the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from beds.engine_bed import EngineBed
from octavo.durable import Postponed
from octavo.engine.prefix_keeper import REST


class Disk:
    """Takes `seconds` to write on a clock of its own, or fails."""

    def __init__(self, bed: EngineBed, seconds: float) -> None:
        self.time, self.seconds, self.num_writes, self.fails = 100.0, seconds, 0, False
        bed.core.now = bed.core.prefixes._now = lambda: self.time
        bed.model.load_prefixes = lambda path: []  # type: ignore[attr-defined]
        bed.model.save_prefixes = self.write  # type: ignore[attr-defined]

    def write(self, path: str, runs: Any, go_on: Callable[[], bool]) -> None:
        if not go_on():
            raise Postponed
        self.time += self.seconds
        self.num_writes += 1
        if self.fails:
            raise OSError("full")


def test_a_slow_write_is_followed_by_a_long_rest() -> None:
    """An engine that is idle again and again does not write a large file again and again."""
    bed = EngineBed()
    disk = Disk(bed, 3.0)
    keeper = bed.core.prefixes
    keeper.begin("kept", 10.0)
    for number in range(20):
        bed.add([number] * 9, max_tokens=2)
        bed.run()
        seconds = keeper.keep()
        disk.time += 6.0
        assert seconds is None or 0 < seconds <= REST * 3.0
    assert disk.num_writes == 2
    assert disk.num_writes * 3.0 <= (disk.time - 100.0) / 10
    assert keeper.keep(at_once=True) is None
    assert disk.num_writes == 3, "the last one has to be"


def test_a_busy_engine_writes_when_it_is_due() -> None:
    """And with 0 never; a quick write is due again after the time that was asked for."""
    for seconds, expected in ((10.0, 4), (0.0, 0)):
        bed = EngineBed()
        disk = Disk(bed, 0.1)
        bed.core.prefixes.begin("kept", seconds)
        bed.add([1, 2, 3, 4, 5], max_tokens=100)
        for _ in range(42):
            disk.time += 1.0
            bed.core.step()
            bed.scheduler.kv.cache.version += 1
        assert disk.num_writes == expected


def test_a_write_that_fails_is_said_and_not_tried_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The engine goes on; the next change is a reason to try again."""
    bed = EngineBed()
    disk = Disk(bed, 0.0)
    disk.fails = True
    keeper = bed.core.prefixes
    keeper.begin("kept", 0.0)
    for number in (1, 2):
        bed.add([number] * 9, max_tokens=2)
        bed.run()
        assert keeper.keep() is None
        assert keeper.keep() is None
        assert caplog.text.count("prefix cache not kept in kept: full") == number
    disk.fails = False
    bed.core.close()
    assert disk.num_writes == 2, "nothing had changed since"


def test_a_write_gives_way_to_requests() -> None:
    """When somebody comes, an idle engine stops writing, and tries again when it is idle."""
    bed = EngineBed()
    disk = Disk(bed, 1.0)
    keeper = bed.core.prefixes
    keeper.begin("kept", 0.0)
    bed.add([1] * 9, max_tokens=2)
    bed.run()
    assert keeper.keep(go_on=lambda: False) == 0.0
    assert disk.num_writes == 0
    assert keeper.keep(go_on=lambda: True) is None
    assert disk.num_writes == 1


def test_without_a_file_nothing_is_written() -> None:
    bed = EngineBed()
    disk = Disk(bed, 0.0)
    bed.add([1] * 9, max_tokens=2)
    bed.run()
    bed.core.close()
    assert disk.num_writes == 0
