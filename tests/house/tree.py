"""The source tree as the house rules see it."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "octavo"
NOT_OURS = {".git", ".venv", ".venv.removed", "build", "dist", "__pycache__", "shared"}
NOT_OURS |= {".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENDMARKER}


class Module(NamedTuple):
    """One Python file."""

    path: Path
    name: str
    """Relative to the root it was found under, with slashes."""
    tree: ast.Module
    num_code_lines: int
    """Lines that hold code: no blank ones, comments or docstrings."""


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
        tree = ast.parse(text, name)
        yield Module(path, name, tree, num_code_lines(text, tree))


def num_code_lines(text: str, tree: ast.Module) -> int:
    """Lines of `text` that hold more than a comment or a docstring."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - prose)
