"""Documents that can be checked: links, and the two maps from promises to tests and benchmarks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from house.tree import ROOT, files, modules

REQUIREMENTS = list(range(1, 122))
CASES = [1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35]
CASES += [37, 38, 40, 41, 43, 44, 46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68]
CASES += [70, 71, 73, 74, 76, 77, 79, 80, 82, 83, 85, 86, 88, 89, 91, 92, 94, 95, 97, 98, 100, 101]
CASES += [103, 104, 106, 107, 109, 110, 112, 113]

STATES = {"proven", "partly", "later"}
ROW = re.compile(r"^\| ([RC])(\d+) \| (.+?) \| (\w+) \| (.+?) \|$", re.MULTILINE)
PROOF = re.compile(r"`((?:test_|Test)\w+|benchmarks/[^`]+)`")
"""A test, or a benchmark where the promise is a measurement."""


class Row(NamedTuple):
    """One line of docs/requirements.md or docs/cases.md."""

    number: int
    what: str
    state: str
    where: str

    @property
    def proofs(self) -> list[str]:
        return PROOF.findall(self.where)


def rows(text: str, letter: str) -> list[Row]:
    return [
        Row(int(n), what, state, where)
        for x, n, what, state, where in ROW.findall(text)
        if x == letter
    ]


def names_of_tests(root: Path) -> set[str]:
    """Every test function and test class under tests/ (state machines are bound to a name)."""
    found: set[str] = set()
    for module in modules(root / "tests"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.add(node.targets[0].id)
    return {name for name in found if name.startswith(("test_", "Test"))}


def names_of_benchmarks(root: Path) -> set[str]:
    """Files of benchmarks/ that run by themselves (others are what those share)."""
    found = files(root / "benchmarks", ".py")
    return {f"benchmarks/{path.name}" for path in found if "__main__" in path.read_text("utf-8")}


def faults(table: list[Row], wanted: list[int], known: set[str]) -> Iterator[str]:
    """What is wrong with a map: numbers, states, tests or benchmarks that do not exist."""
    counts = Counter(row.number for row in table)
    yield from (f"{number} is missing" for number in wanted if not counts[number])
    yield from (f"{number} is there {n} times" for number, n in counts.items() if n > 1)
    yield from (f"{number} is no such number" for number in counts if number not in wanted)
    for row in table:
        if row.state not in STATES:
            yield f"{row.number}: state {row.state}"
        if row.state == "later" and row.proofs:
            yield f"{row.number}: later, but names a proof"
        if row.state != "later" and not row.proofs:
            yield f"{row.number}: {row.state}, but names no test and no benchmark"
        yield from (f"{row.number}: no {name}" for name in row.proofs if name not in known)


def broken_links(root: Path, page: Path) -> list[str]:
    """Relative links of a page that lead nowhere: files, and headings in Markdown files."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        inside = path.is_relative_to(root.resolve()) and path.exists()
        if not inside or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def pages(root: Path) -> list[Path]:
    return [*files(root / "docs", ".md"), root / "README.md"]


def test_links_lead_somewhere() -> None:
    assert {page.name: broken_links(ROOT, page) for page in pages(ROOT)} == {
        page.name: [] for page in pages(ROOT)
    }


@pytest.mark.parametrize(
    ("page", "letter", "wanted"),
    [("requirements.md", "R", REQUIREMENTS), ("cases.md", "C", CASES)],
    ids=["requirements", "cases"],
)
def test_every_promise_is_listed_once_with_proofs_that_exist(
    page: str, letter: str, wanted: list[int]
) -> None:
    table = rows((ROOT / "docs" / page).read_text("utf-8"), letter)
    assert list(faults(table, wanted, names_of_tests(ROOT) | names_of_benchmarks(ROOT))) == []


def test_the_numbers_are_complete() -> None:
    assert (len(REQUIREMENTS), len(CASES), len(set(CASES))) == (121, 76, 76)


GOOD = [Row(1, "a", "proven", "`test_a`"), Row(2, "b", "later", "swap")]


@pytest.mark.parametrize(
    "table",
    [
        GOOD[:1],
        [*GOOD, GOOD[0]],
        [*GOOD, Row(3, "c", "later", "swap")],
        [GOOD[0], Row(2, "b", "proven", "`test_gone`")],
        [GOOD[0], Row(2, "b", "proven", "`benchmarks/gone.py`")],
        [GOOD[0], Row(2, "b", "proven", "by looking at it")],
        [GOOD[0], Row(2, "b", "later", "`test_a`")],
        [GOOD[0], Row(2, "b", "later", "`benchmarks/b.py`")],
        [GOOD[0], Row(2, "b", "done", "`test_a`")],
    ],
    ids=[
        "missing",
        "twice",
        "unknown",
        "no such test",
        "no such benchmark",
        "no proof",
        "later with a test",
        "later with a benchmark",
        "state",
    ],
)
def test_a_faulty_map_is_seen(table: list[Row]) -> None:
    known = {"test_a", "benchmarks/b.py"}
    measured = Row(3, "c", "proven", "`benchmarks/b.py`: its numbers")
    assert list(faults([*GOOD, measured], [1, 2, 3], known)) == []
    assert len(list(faults(table, [1, 2], known))) == 1


def test_a_row_is_read_from_its_line() -> None:
    text = "| # | What |\n| R27 | slot 137 | proven | `test_a`, `TestB` |\n| C3 | x | later | y |\n"
    assert rows(text, "R") == [Row(27, "slot 137", "proven", "`test_a`, `TestB`")]
    assert rows(text, "R")[0].proofs == ["test_a", "TestB"]
    assert Row(1, "a", "proven", "`test_a`; `benchmarks/b.py`").proofs[1:] == ["benchmarks/b.py"]


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One two\n[a](#one-two) [b](https://x) [c](b.md) [d](#three) [e](../x)\n")
    assert broken_links(tmp_path, page) == ["b.md", "#three", "../x"]
