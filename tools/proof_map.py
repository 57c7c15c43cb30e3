"""Which tests claim a requirement (R27) or a case (C16) in their docstring.

    python tools/proof_map.py            list them, by number
    python tools/proof_map.py --write    bring their names into docs/requirements.md and cases.md

State and note of each row there are kept by hand, and so are names where no test claims a row.
Rows that are "later" name no tests. Tests that claim few numbers come before those that claim many.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
NUMBERS = re.compile(r"\b([RC])(\d+)(?:\s*(?:-|to)\s*[RC]?(\d+))?\b")
ROW = re.compile(r"^(\| )([RC]\d+)( \| .+? \| )(\w+) \| (.+?) \|$", re.MULTILINE)
MAX_NAMES = 4
"""Tests named in a row; the most specific ones."""


def claims(tests: Path = TESTS) -> dict[str, list[str]]:
    """By number ("R27"): names of tests whose docstring says it, the most specific first."""
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith(("test_", "Test")):
                continue
            numbers = list(numbers_in(ast.get_docstring(node) or ""))
            for number in numbers:
                found[number].append((len(numbers), node.name))
    return {number: [name for _, name in sorted(set(names))] for number, names in found.items()}


def numbers_in(text: str) -> set[str]:
    """R27, C16, and all of a range like R22-R31 or R22 to R31."""
    return {
        f"{letter}{number}"
        for letter, first, last in NUMBERS.findall(text)
        for number in range(int(first), int(last or first) + 1)
    }


def filled(page: str, known: dict[str, list[str]]) -> str:
    """The page with the names of tests in its rows as they are now; notes stay."""

    def row(match: re.Match[str]) -> str:
        start, number, middle, state, where = match.groups()
        note = "" if where == "?" else re.sub(r"^(`\w+`(, )?)*(; )?", "", where)
        names = known.get(number, [])
        if state == "later" or not names:
            return match[0]
        shown = ", ".join(f"`{name}`" for name in names[:MAX_NAMES])
        return f"{start}{number}{middle}{state} | {'; '.join(filter(None, [shown, note])) or '?'} |"

    return ROW.sub(row, page)


def main() -> None:
    known = claims()
    if sys.argv[1:] == ["--write"]:
        for name in ("requirements.md", "cases.md"):
            path = TESTS.parent / "docs" / name
            path.write_text(filled(path.read_text("utf-8"), known), "utf-8")
        return
    for number, names in sorted(known.items(), key=lambda item: (item[0][0], int(item[0][1:]))):
        print(f"{number}: {', '.join(names)}")


if __name__ == "__main__":
    main()
