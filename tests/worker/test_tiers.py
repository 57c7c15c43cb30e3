"""Tiers below the pool: what is stored comes back, or is known to be lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from beds.backends import kernels_of
from octavo.config import CacheConfig
from octavo.errors import ConfigError
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
        file_tier_dir=str(folder),
    )
    return Tiers(config, pool)


def first(tiers: Tiers, block_id: int) -> float:
    return float(tiers.kv_cache.read_block(1, block_id)[0][0, 0, 0])


def test_blocks_go_and_come_back_in_order(tmp_path: Path) -> None:
    """R98: RAM and file; a slot may be read and given away in one plan, as may a block."""
    tiers = make(1, 2, tmp_path)
    assert tiers.num_slots == (1, 2)
    tiers.move([Transfer("store", 0, 0), Transfer("store", 1, 1), Transfer("store", 2, 2)])
    lost, moved = tiers.move(
        [
            Transfer("copy", 3, 4),
            Transfer("load", 1, 3),
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
        ("load", 0): 1,
    }
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    tiers.close()


def test_a_file_that_fails_loses_blocks_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a broken one: the load says so, whoever asks."""
    tiers = make(1, 2, tmp_path)

    def full(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr("octavo.worker.tiers.os.pwrite", full)
    tiers.move([Transfer("store", 0, 1), Transfer("store", 1, 0)])
    monkeypatch.undo()
    assert tiers.move([Transfer("load", 1, 2), Transfer("load", 0, 3)])[0] == {2}
    assert first(tiers, 3) == 2
    tiers.move([Transfer("store", 4, 1)])
    assert tiers.move([Transfer("load", 1, 2)])[0] == set()
    assert first(tiers, 2) == 5


def test_an_interrupt_leaves_no_slot_that_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two blocks: the rest can't be read, in RAM either."""
    tiers = make(3, 0, tmp_path)
    store = tiers._store

    def interrupted(block_id: int, slot: int) -> None:
        if slot == 1:
            raise KeyboardInterrupt
        store(block_id, slot)

    monkeypatch.setattr(tiers, "_store", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiers.move([Transfer("store", slot, slot) for slot in range(3)])
    loads = [Transfer("load", slot, 3 + slot) for slot in range(3)]
    assert tiers.move(loads)[0] == {4, 5}


def test_a_tier_holds_at_least_a_block(tmp_path: Path) -> None:
    """A user's mistake, with the size of a block in the text; so is a folder that is not there."""
    pool = make(1, 0, tmp_path).kv_cache
    with pytest.raises(ConfigError, match=f"{pool.block_nbytes:,}"):
        Tiers(CacheConfig(ram_tier_memory=pool.block_nbytes - 1), pool)
    with pytest.raises(ConfigError, match="file_tier_dir"):
        Tiers(CacheConfig(file_tier_memory=1 << 20, file_tier_dir=str(tmp_path / "no")), pool)


def test_memory_is_used_only_when_something_is_stored() -> None:
    """A budget of 16 GiB costs nothing by itself."""
    pool = kernels_of("reference").allocate_kv_cache(
        num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8
    )
    tiers = Tiers(CacheConfig(ram_tier_memory=1 << 34), pool)
    tiers.move([Transfer("store", 0, 7)])
    assert tiers.read(7, True) is not None
    assert np.shape(tiers._ram) == ((1 << 34) // pool.block_nbytes, pool.block_nbytes)
