"""Words that do not belong in the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from house.tree import ROOT, files

# Each is joined from two pieces, so that this file does not find itself.
UNFINISHED = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]
SOMEONES_MACHINE = ["wo" + "rk", "ro" + "ot", "ho" + "me"]
PACKAGE_INDEX = ["py" + "pi.org", "python" + "hosted"]
FORBIDDEN = re.compile(
    rf"\b({'|'.join(UNFINISHED)})\b"
    rf"|(?<![\w.])/({'|'.join(SOMEONES_MACHINE)})/\w"
    rf"|{'|'.join(map(re.escape, PACKAGE_INDEX))}"
)
BINARY = {".gz", ".png", ".so", ".gguf", ".safetensors", ".npz", ".ico"}


def found_in(root: Path) -> list[str]:
    """file:line: word, for all of the project's text files."""
    return [
        f"{path.relative_to(root)}:{number}: {match[0]}"
        for path in files(root)
        if path.suffix not in BINARY
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for match in FORBIDDEN.finditer(line)
    ]


def test_nothing_unfinished_and_nothing_of_one_machine() -> None:
    """No unfinished marks, no paths of somebody's machine, no package index by its address."""
    assert found_in(ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        *(f"# {word}: later" for word in UNFINISHED),
        *(f"see /{folder}/a.py" for folder in SOMEONES_MACHINE),
        *(f"https://{host}/simple" for host in PACKAGE_INDEX),
    ],
)
def test_a_forbidden_word_is_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.md").write_text(f"fine\n{text}\n")
    assert len(found_in(tmp_path)) == 1


@pytest.mark.parametrize("text", ["homework/x", "framework/a", "a/work/b", "todo lists", "/health"])
def test_ordinary_words_pass(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.md").write_text(text)
    assert found_in(tmp_path) == []
