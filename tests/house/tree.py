"""The source tree as the house rules see it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "octavo"
NOT_OURS = {".git", ".venv", ".venv.removed", "build", "dist", "__pycache__", "shared"}
NOT_OURS |= {".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


class Module(NamedTuple):
    """One Python file."""

    path: Path
    name: str
    """Relative to the root it was found under, with slashes."""
    tree: ast.Module
    num_lines: int


def files(root: Path, *suffixes: str) -> Iterator[Path]:
    """Files that are the project's own, in order; all, or those with a suffix."""
    for entry in sorted(root.iterdir()):
        if entry.name in NOT_OURS or entry.name.endswith(".egg-info"):
            continue
        if entry.is_dir():
            yield from files(entry, *suffixes)
        elif not suffixes or entry.suffix in suffixes:
            yield entry


def modules(root: Path) -> Iterator[Module]:
    """All Python files under `root`, parsed."""
    for path in files(root, ".py"):
        text = path.read_text("utf-8")
        name = path.relative_to(root).as_posix()
        yield Module(path, name, ast.parse(text, name), len(text.splitlines()))
