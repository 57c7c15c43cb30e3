"""The file of kept prefixes by itself: whole, or not one block of it is used."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beds.backends import kernels_of
from octavo.config import CacheConfig
from octavo.durable import Postponed
from octavo.errors import ConfigError
from octavo.messages import KeptRun, Transfer
from octavo.worker import prefix_file
from octavo.worker.prefix_file import HEAD_SIZE, MAGIC, load_prefixes
from octavo.worker.tiers import Tiers

RUNS = [
    KeptRun("", -1, tuple(range(8)), (0, 1), False),
    KeptRun("", 0, tuple(range(8, 12)), (2,), True),
    KeptRun("salt", -1, tuple(range(8)), (3, 4), False),
    KeptRun("salt", 2, (5, 5, 5, 5), (5,), False),
]


def save_prefixes(path: str, runs: list[KeptRun], mark: str, tiers: Tiers) -> None:
    prefix_file.save_prefixes(path, runs, mark, tiers, go_on=lambda: True)


def make(num_ram: int = 4, num_file: int = 4) -> Tiers:
    """Blocks of 256 bytes, of 4 tokens each; block i is full of i + 1, as is slot 2 of 9."""
    pool = kernels_of("reference").allocate_kv_cache(
        num_layers=1, num_blocks=7, block_size=4, num_kv_heads=1, head_dim=8
    )
    config = CacheConfig(
        ram_tier_memory=num_ram * pool.block_nbytes, file_tier_memory=num_file * pool.block_nbytes
    )
    tiers = Tiers(config, pool)
    for block_id in range(6):
        pool.fill_block(block_id, block_id + 1.0)
    pool.fill_block(6, 9.0)
    return tiers


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file of RUNS."""
    tiers = make()
    tiers.move([Transfer("store", 6, 2)])
    save_prefixes(str(tmp_path / "kept"), RUNS, "mark", tiers)
    yield tmp_path / "kept"
    tiers.close()


def values(tiers: Tiers, num_slots: int) -> list[float]:
    found = []
    for slot in range(num_slots):
        block = tiers.read(slot, True)
        assert block is not None
        found.append(float(np.frombuffer(block.data, np.float32)[0]))
    return found


def test_what_is_written_is_read_into_the_first_slots(path: Path) -> None:
    """Tokens, scopes, who follows whom, and each block; the first runs are in RAM."""
    tiers = make(3, 4)
    runs = load_prefixes(str(path), "mark", tiers)
    assert [run._replace(places=()) for run in runs] == [
        run._replace(places=(), in_tier=True) for run in RUNS
    ]
    assert [place for run in runs for place in run.places] == list(range(6))
    assert values(tiers, 6) == [1, 2, 9, 4, 5, 6]
    assert sorted(tiers._rows[0]) == [0, 1, 2]
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_tiers_that_are_smaller_take_the_first_runs(path: Path) -> None:
    tiers = make(1, 2)
    assert [len(run.places) for run in load_prefixes(str(path), "mark", tiers)] == [2, 1]
    assert values(tiers, 3) == [1, 2, 9]


def refused(path: Path, caplog: pytest.LogCaptureFixture, mark: str = "mark") -> bool:
    caplog.clear()
    tiers = make()
    runs = load_prefixes(str(path), mark, tiers)
    line = f"prefix cache file {path} is not used: "
    assert not runs or line not in caplog.text
    assert runs or tiers.use().num_used == (0, 0), "blocks of it stayed"
    tiers.close()
    return not runs and caplog.text.count(line) == 1 and len(caplog.records) == 1


def offsets(whole: bytes) -> list[int]:
    """All of head and index, the borders of blocks, and a few in each block."""
    end = HEAD_SIZE + 6 * 256
    in_blocks = [at for at in range(HEAD_SIZE, end) if (at - HEAD_SIZE) % 64 in (0, 1, 63)]
    return [*range(HEAD_SIZE), *in_blocks, *range(end, len(whole))]


def test_cut_off_anywhere_it_is_refused(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And longer by one byte, too."""
    whole = path.read_bytes()
    for size in offsets(whole):
        path.write_bytes(whole[:size])
        assert refused(path, caplog), size
    path.write_bytes(whole + b"x")
    assert refused(path, caplog)


def test_a_bit_that_flipped_anywhere_is_seen(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the head, in a block, in the index; one bit of each byte."""
    whole = bytearray(path.read_bytes())
    for at in offsets(whole):
        whole[at] ^= 1 << at % 8
        path.write_bytes(whole)
        assert refused(path, caplog), at
        whole[at] ^= 1 << at % 8
    path.write_bytes(whole)
    assert not refused(path, caplog)


@pytest.mark.parametrize(
    "index",
    [
        b"{}",
        b"[]",
        b"not JSON",
        b'{"fingerprint":"mark","runs":[],"checksums":3}',
        b'{"fingerprint":"mark","runs":[["",0]],"checksums":[]}',
        b'{"fingerprint":"mark","runs":[["",7,[1,2,3,4],1]],"checksums":[1]}',
        b"[" * 100_000,
    ],
)
def test_a_file_that_was_made_up_is_refused(
    path: Path, index: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A right digest is no reason to trust what is in it."""
    from octavo.worker.prefix_file import _digest

    path.write_bytes(MAGIC + len(index).to_bytes(8, "little") + _digest(index) + index)
    assert refused(path, caplog)


def test_a_file_for_something_else_is_refused(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert refused(path, caplog, mark="another")
    assert "another model" in caplog.text


def test_runs_that_can_not_be_read_are_left_out(path: Path) -> None:
    """And all that follow them; the rest is kept (a tier's file that failed)."""
    tiers = make()
    runs = [
        RUNS[0],
        RUNS[1]._replace(places=(7,)),  # nothing is in that slot
        RUNS[2],
        RUNS[3],
        KeptRun("", 1, (6, 6, 6, 6), (5,), False),
        KeptRun("salt", 3, (7, 7, 7, 7), (0,), False),
    ]
    save_prefixes(str(path), runs, "mark", tiers)
    loaded = load_prefixes(str(path), "mark", make())
    assert [(run.scope, run.parent, run.token_ids) for run in loaded] == [
        ("", -1, tuple(range(8))),
        ("salt", -1, tuple(range(8))),
        ("salt", 1, (5, 5, 5, 5)),
        ("salt", 2, (7, 7, 7, 7)),
    ]


def test_only_one_process_writes_at_a_time(path: Path) -> None:
    """The other is told, and the file is whole; what a killed one left is in nobody's way."""
    whole = path.read_bytes()
    new = Path(f"{path}.new")
    new.write_bytes(b"left by a killed process" * 1000)
    with new.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process"):
            save_prefixes(str(path), RUNS[:1], "mark", make())
        assert path.read_bytes() == whole
    save_prefixes(str(path), RUNS[:1], "mark", make())
    assert len(load_prefixes(str(path), "mark", make())) == 1
    assert not new.exists()


def test_what_lies_there_lends_neither_its_rights_nor_its_target(path: Path) -> None:
    """Prompts are their owner's alone, and a link beside the file leads nowhere."""
    new = Path(f"{path}.new")
    new.touch(0o666)
    new.chmod(0o666)
    save_prefixes(str(path), RUNS[:1], "mark", make())
    assert oct(path.stat().st_mode)[-3:] == "600"
    (other := path.with_name("precious")).write_text("precious")
    new.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        save_prefixes(str(path), RUNS, "mark", make())
    assert other.read_text() == "precious"
    assert len(load_prefixes(str(path), "mark", make())) == 1


def test_a_writer_that_comes_late_does_not_write_into_the_new_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process puts its file into place between our opening and our lock."""
    real = fcntl.flock

    def late(file: object, how: int) -> None:
        os.replace(f"{path}.new", path)
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr("octavo.durable.flock", late)
    Path(f"{path}.new").write_bytes(whole := path.read_bytes())
    with pytest.raises(OSError, match="another process"):
        save_prefixes(str(path), RUNS[:1], "mark", make())
    assert path.read_bytes() == whole


def test_a_path_that_can_not_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """No folder, a folder, a pipe (which would wait for ever): a user's mistake, said early."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing/kept", "", "pipe"):
        with pytest.raises(ConfigError, match="prefix_cache_file"):
            load_prefixes(str(tmp_path / name), "mark", make())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="prefix_cache_file"):
        load_prefixes(str(tmp_path / "file" / "kept"), "mark", make())
    assert load_prefixes(str(tmp_path / "kept"), "mark", make()) == []


def test_what_is_postponed_leaves_the_old_file(path: Path) -> None:
    """At any run of it; and it says so by an exception that is no fault."""
    whole = path.read_bytes()
    for num_runs in range(len(RUNS)):
        answers = iter([True] * num_runs + [False])
        with pytest.raises(Postponed):
            prefix_file.save_prefixes(
                str(path),
                RUNS,
                "other",
                make(),
                go_on=lambda: next(answers),  # noqa: B023
            )
        assert path.read_bytes() == whole
        assert list(path.parent.iterdir()) == [path]


def test_the_index_is_what_it_says(path: Path) -> None:
    """Scopes and tokens in the clear: the help says so."""
    data = path.read_bytes()
    index = json.loads(data[HEAD_SIZE + 6 * 256 :])
    assert [run[0] for run in index["runs"]] == ["", "", "salt", "salt"]
    assert index["runs"][1][2] == [8, 9, 10, 11]
