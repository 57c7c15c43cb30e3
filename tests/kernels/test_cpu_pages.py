"""The start-up report says whether memory lies on huge pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octavo.kernels.cpu import make_kernels
from octavo.kernels.cpu.pages import ROLLUP, SWITCH, describe_huge_pages


def test_the_report_says_how_much_or_why_none(tmp_path: Path) -> None:
    rollup, switch = tmp_path / "rollup", tmp_path / "enabled"
    assert describe_huge_pages(rollup, switch) == "not known: the system does not say"
    rollup.write_text("Rss:   900000 kB\nAnonHugePages:    526336 kB\nShmemPmdMapped:  0 kB\n")
    assert describe_huge_pages(rollup, switch) == "514 MiB"
    rollup.write_text("Rss: 900000 kB\nAnonHugePages: 4096 kB\nFilePmdMapped: 262144 kB\n")
    assert describe_huge_pages(rollup, switch) == "260 MiB, 256 of them of mapped files"
    rollup.write_text("Rss:   900000 kB\nAnonHugePages:         0 kB\n")
    assert describe_huge_pages(rollup, switch) == "none"
    switch.write_text("always madvise [never]\n")
    assert describe_huge_pages(rollup, switch) == "none: transparent_hugepage is never"


def test_memory_asks_for_huge_pages_unless_told_not_to() -> None:
    """Pool and scratch memory, with and without: by the system's count of huge pages."""
    if not has_huge_pages():
        assert "MiB" not in describe_huge_pages()
        return
    shape = {"num_layers": 1, "num_blocks": 4096, "block_size": 16, "num_kv_heads": 1}
    taken, pools, arenas = [], [], []
    for wanted in (True, False):
        kernels = make_kernels(huge_pages=wanted)
        before = huge_kib()
        pool = kernels.allocate_kv_cache(**shape, head_dim=64)
        pools.append(pool)  # none is given back in between
        for block in range(pool.num_blocks):
            pool.fill_block(block, 1.0)
        taken.append((huge_kib() - before) << 10)
        for _ in range(8):
            arenas.append(kernels.make_arena())
            arenas[-1].empty((1000,), np.float32)[:] = 1.0  # of however little
        taken.append(((huge_kib() - before) << 10) - taken[-1])
    make_kernels()
    assert taken[0] >= pools[0].nbytes // 2
    assert taken[1] >= 8 * (2 << 20) // 2
    assert taken[2:] == [0, 0]


def has_huge_pages() -> bool:
    text = SWITCH.read_text() if SWITCH.exists() else ""
    return "[madvise]" in text


def huge_kib() -> int:
    text = ROLLUP.read_text()
    return next(int(x.split()[1]) for x in text.splitlines() if x.startswith("AnonHugePages"))
