"""Tiers below the pool: what is stored comes back, or is known to be lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beds.backends import kernels_of
from octavo.config import CacheConfig
from octavo.errors import ConfigError
from octavo.kernels.api import Array
from octavo.messages import Transfer
from octavo.worker.tiers import Tiers


def make(num_ram: int, num_file: int, folder: Path) -> Tiers:
    pool = kernels_of("reference").allocate_kv_cache(
        num_layers=2, num_blocks=6, block_size=4, num_kv_heads=1, head_dim=8
    )
    for block_id in range(6):
        pool.fill_block(block_id, block_id + 1.0)
    config = CacheConfig(
        ram_tier_memory=num_ram * pool.block_nbytes,
        file_tier_memory=num_file * pool.block_nbytes,
        file_tier_dir=str(folder) if num_file else None,
    )
    return Tiers(config, pool)


def first(tiers: Tiers, block_id: int) -> float:
    return float(tiers.kv_cache.read_block(1, block_id)[0][0, 0, 0])


def test_blocks_go_and_come_back_in_order(tmp_path: Path) -> None:
    """R98: RAM and file; a slot may be read and given away in one plan, as may a block."""
    tiers = make(1, 2, tmp_path)
    assert tiers.num_slots == (1, 2)
    tiers.move([Transfer("store", 0, 0), Transfer("store", 1, 1), Transfer("store", 2, 2)])
    assert num_used(tiers) == (1, 2)
    lost, moved = tiers.move(
        [
            Transfer("copy", 3, 4),
            Transfer("load", 1, 3),
            Transfer("drop", 1, 1),
            Transfer("store", 5, 1),
            Transfer("load", 0, 5),
            Transfer("load", 1, 0),
        ]
    )
    assert lost == set()
    assert [first(tiers, i) for i in range(6)] == [6, 2, 3, 2, 4, 1]
    assert {(m.kind, m.tier): m.num_blocks for m in moved} == {
        ("load", 1): 2,
        ("store", 1): 1,
        ("demote", 1): 1,
        ("load", 0): 1,
        ("copy", 0): 1,
        ("drop", 1): 1,
    }
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    tiers.close()


def num_used(tiers: Tiers) -> tuple[int, ...]:
    """Blocks in RAM and in the file."""
    return tiers.use().num_used


def in_ram(tiers: Tiers) -> list[int]:
    return list(tiers._rows[0])


def test_what_was_stored_longest_ago_moves_to_the_file(tmp_path: Path) -> None:
    """Whatever the numbers of the slots are: what came last is in RAM, and nothing is lost."""
    tiers = make(2, 3, tmp_path)
    for block_id, slot in enumerate((4, 0, 3, 1)):
        tiers.move([Transfer("store", block_id, slot)])
    assert in_ram(tiers) == [3, 1]
    assert num_used(tiers) == (2, 2)
    tiers.move([Transfer("drop", 3, 3), Transfer("store", 4, 2)])
    assert in_ram(tiers) == [1, 2], "a row in RAM was free: nothing had to move"
    assert num_used(tiers) == (2, 2)
    tiers.move([Transfer("store", 5, 3)])
    assert in_ram(tiers) == [2, 3]
    assert num_used(tiers) == (2, 3)
    loads = [Transfer("load", slot, block_id) for block_id, slot in enumerate((4, 0, 1, 2, 3))]
    assert tiers.move(loads)[0] == set()
    assert [first(tiers, i) for i in range(5)] == [1, 2, 4, 5, 6]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_ram=st.integers(0, 4), num_file=st.integers(0, 4), data=st.data())
def test_any_order_of_moves_gives_back_what_was_stored(
    num_ram: int, num_file: int, data: st.DataObject, tmp_path: Path
) -> None:
    """Stored, dropped, stored over, loaded: every slot holds its own, each tier within its size."""
    tiers = make(num_ram, num_file, tmp_path)
    slots = st.integers(0, num_ram + num_file - 1)
    kept: dict[int, float] = {}
    for _ in range(data.draw(st.integers(0, 30)) if num_ram + num_file else 0):
        slot, kind = data.draw(slots), data.draw(st.sampled_from(["store", "load", "drop"]))
        if kind == "store":
            block_id = data.draw(st.integers(0, 4))
            kept[slot] = block_id + 1.0
            tiers.move([Transfer("store", block_id, slot)])
        elif kind == "drop":
            kept.pop(slot, None)
            tiers.move([Transfer("drop", slot, slot)])
        else:
            lost, _ = tiers.move([Transfer("load", slot, 5)])
            assert lost == (set() if slot in kept else {5})
            assert slot not in kept or first(tiers, 5) == kept[slot]
        used = num_used(tiers)
        assert sum(used) == len(kept)
        assert used[0] <= num_ram
        assert used[1] <= num_file
    if tiers._file is not None:
        assert os.fstat(tiers._file).st_size <= num_file * tiers.block_nbytes
    tiers.close()


def test_a_file_that_fails_loses_blocks_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk or a broken one: the load says so, whoever asks; the log says it once."""
    tiers = make(1, 2, tmp_path)

    def full(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr("octavo.worker.tiers.os.pwrite", full)
    tiers.move([Transfer("store", block_id, slot) for block_id, slot in enumerate((2, 1, 0))])
    monkeypatch.undo()
    loads = [Transfer("load", 2, 5), Transfer("load", 1, 2), Transfer("load", 0, 3)]
    assert tiers.move(loads)[0] == {5, 2}
    assert first(tiers, 3) == 3, "what came last is in RAM"
    assert caplog.text.count("no space left") == 1
    tiers.move([Transfer("store", 4, 1)])
    assert tiers.move([Transfer("load", 1, 2), Transfer("load", 0, 1)])[0] == set()
    assert (first(tiers, 2), first(tiers, 1)) == (5, 3)
    monkeypatch.setattr("octavo.worker.tiers.os.pwrite", full)
    tiers.move([Transfer("store", block_id, 2) for block_id in range(3)])
    assert caplog.text.count("no space left") == 2, "it had worked in between"


def test_what_is_made_of_lost_blocks_is_lost(tmp_path: Path) -> None:
    """A copy of a block that could not be loaded, and what is stored of it, in the same plan."""
    tiers = make(4, 0, tmp_path)
    tiers.move([Transfer("store", 0, 3)])
    lost, _ = tiers.move(
        [
            Transfer("load", 0, 4),
            Transfer("copy", 4, 5),
            Transfer("store", 5, 1),
            Transfer("load", 3, 2),
            Transfer("load", 1, 3),
        ]
    )
    assert lost == {3, 4, 5}
    assert first(tiers, 2) == 1


@pytest.mark.parametrize("fault", [lambda *_: 3, OSError("input/output error")])
def test_a_block_that_is_not_read_whole_is_lost(
    fault: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of it, or nothing: never half a block for a whole one."""
    tiers = make(0, 1, tmp_path)
    tiers.move([Transfer("store", 0, 0)])
    monkeypatch.setattr("octavo.worker.tiers.os.preadv", mock.Mock(side_effect=fault))
    assert tiers.move([Transfer("load", 0, 1)])[0] == {1}
    monkeypatch.undo()
    assert tiers.move([Transfer("load", 0, 1)])[0] == set()


LIMITED = """
import logging, resource, sys
logging.basicConfig(stream=sys.stdout)
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from worker.test_tiers import Transfer, first, make, num_used
tiers = make(1, 4, Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * tiers.block_nbytes,) * 2)
tiers.move([Transfer("store", i, i) for i in range(5)])
print(num_used(tiers), sorted(tiers.move([Transfer("load", i, i) for i in range(5)])[0]))
print([first(tiers, i) for i in range(5)])
"""


def test_a_file_that_may_not_grow_is_no_end(tmp_path: Path) -> None:
    """The system's own refusal (a limit of the size of files, as a full disk): what fitted is
    there, the rest is known to be gone."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), *sys.path],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.count("File too large") == 1
    assert "(1, 2) [2, 3]\n[1.0, 2.0, 3.0, 4.0, 5.0]" in done.stdout


def test_a_file_that_is_taken_away_while_it_is_used_is_still_there(tmp_path: Path) -> None:
    """It has no name that anybody could remove, and its folder may go."""
    folder = tmp_path / "tier"
    folder.mkdir()
    tiers = make(0, 2, folder)
    tiers.move([Transfer("store", 0, 0)])
    folder.rmdir()
    tiers.move([Transfer("store", 1, 1)])
    assert tiers.move([Transfer("load", 0, 4), Transfer("load", 1, 5)])[0] == set()
    assert (first(tiers, 4), first(tiers, 5)) == (1, 2)


def test_an_interrupt_leaves_no_slot_that_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two blocks: the rest can't be read, in RAM either."""
    tiers = make(3, 0, tmp_path)
    fill = tiers.fill

    def interrupted(slot: int, write: Callable[[Array], object]) -> int:
        if slot == 1:
            raise KeyboardInterrupt
        return fill(slot, write)

    monkeypatch.setattr(tiers, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiers.move([Transfer("store", slot, slot) for slot in range(3)])
    loads = [Transfer("load", slot, 3 + slot) for slot in range(3)]
    assert tiers.move(loads)[0] == {4, 5}
    with pytest.raises(KeyboardInterrupt):
        tiers.move([Transfer("store", 1, 1), Transfer("drop", 0, 0), Transfer("store", 2, 0)])
    assert tiers.move(loads)[0] == {3, 4, 5}, "what was there before is not what was to be there"


def test_a_tier_holds_at_least_a_block(tmp_path: Path) -> None:
    """A user's mistake, with the size of a block in the text; so is a folder that is not there."""
    pool = make(1, 0, tmp_path).kv_cache
    with pytest.raises(ConfigError, match=f"{pool.block_nbytes:,}"):
        Tiers(CacheConfig(ram_tier_memory=pool.block_nbytes - 1), pool)
    with pytest.raises(ConfigError, match="0 or more"):
        CacheConfig(ram_tier_memory=-1)
    with pytest.raises(ConfigError, match="file_tier_dir"):
        Tiers(CacheConfig(file_tier_memory=1 << 20, file_tier_dir=str(tmp_path / "no")), pool)


def test_memory_is_used_only_when_something_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 16 GiB costs nothing by itself, a file of any size neither; more RAM than the
    system gives is a user's mistake."""
    pool = kernels_of("reference").allocate_kv_cache(
        num_layers=32, num_blocks=1, block_size=16, num_kv_heads=4, head_dim=8
    )
    with monkeypatch.context() as patch:
        patch.setattr("octavo.worker.tiers.MAX_ROWS", 1 << 60)
        with pytest.raises(ConfigError, match=r"ram_tier_memory .* smaller"):
            Tiers(CacheConfig(ram_tier_memory=10**30), pool)
    tiers = Tiers(CacheConfig(ram_tier_memory=1 << 34, file_tier_memory=10**30), pool)
    tiers.move([Transfer("store", 0, 7)])
    assert tiers.read(7, True) is not None
    assert tiers._ram.nbytes == 1 << 34
