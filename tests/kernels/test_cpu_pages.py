"""The start-up report says whether memory lies on huge pages."""

from __future__ import annotations

from pathlib import Path

from octavo.kernels.cpu.pages import describe_huge_pages


def test_the_report_says_how_much_or_why_none(tmp_path: Path) -> None:
    rollup, switch = tmp_path / "rollup", tmp_path / "enabled"
    assert describe_huge_pages(rollup, switch) == "not known: the system does not say"
    rollup.write_text("Rss:   900000 kB\nAnonHugePages:    526336 kB\nShmemPmdMapped:  0 kB\n")
    assert describe_huge_pages(rollup, switch) == "514 MiB"
    rollup.write_text("Rss:   900000 kB\nAnonHugePages:         0 kB\n")
    assert describe_huge_pages(rollup, switch) == "none"
    switch.write_text("always madvise [never]\n")
    assert describe_huge_pages(rollup, switch) == "none: transparent_hugepage is never"
