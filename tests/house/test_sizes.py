"""Sizes that keep the code readable; each limit with the exceptions that have a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house.tree import PACKAGE, ROOT, files, modules

MAX_FILE = {".py": 500, ".cpp": 600, ".hpp": 600}
MAX_FUNCTION = 80
MAX_ATTRIBUTES = 15
MAX_POSITIONAL = 4
MAX_ENGINE_ROOMS = 6_200
"""Lines of code; see docs/decisions/0002-lines-of-code.md."""
ENGINE_ROOMS = ("core", "worker", "models", "sampling", "engine")

MANY_ATTRIBUTES = {
    "Request": "the request is the one record of its own life; splitting it would hide state",
}
MANY_POSITIONAL = {
    "kernels/": "an op takes its arrays in the order of the op table",
    "engine/chat_sandbox.py: _tojson": "stands in for a filter whose parameters templates know",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_files(root: Path) -> list[str]:
    counted = ((path, len(path.read_text().splitlines())) for path in files(root, *MAX_FILE))
    return [f"{path.name}: {lines}" for path, lines in counted if lines > MAX_FILE[path.suffix]]


def long_functions(root: Path) -> list[str]:
    return [
        f"{module.name}: {node.name}"
        for module in modules(root)
        for node in ast.walk(module.tree)
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION
    ]


def attributes(cls: ast.ClassDef) -> set[str]:
    """Names of a class's mutable state: slots, self.x = ..., fields of a dataclass not frozen."""
    names: set[str] = set()
    for node in ast.walk(cls):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    mutable = any(
        "dataclass" in d and "frozen=True" not in d for d in map(ast.unparse, cls.decorator_list)
    )
    for statement in cls.body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and mutable
        ):
            names.add(statement.target.id)
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            names.update(
                str(s.value) for s in ast.walk(statement.value) if isinstance(s, ast.Constant)
            )
    return names


def crowded_classes(root: Path) -> set[str]:
    return {
        node.name
        for module in modules(root)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and len(attributes(node)) > MAX_ATTRIBUTES
    }


def crowded_signatures(root: Path) -> list[str]:
    """Functions with too many positional parameters, self and cls not counted."""
    found: list[str] = []
    for module in modules(root):
        methods = {
            child
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
            for child in node.body
            if isinstance(child, Function)
            and "staticmethod" not in map(ast.unparse, child.decorator_list)
        }
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                count = len(node.args.posonlyargs) + len(node.args.args) - (node in methods)
                if count > MAX_POSITIONAL:
                    found.append(f"{module.name}: {node.name}")
    return found


def excused(breach: str) -> bool:
    return breach.startswith(tuple(MANY_POSITIONAL))


def test_files_are_short() -> None:
    assert long_files(ROOT) == []


def test_functions_are_short() -> None:
    assert long_functions(ROOT) == []


def test_classes_hold_little_state() -> None:
    """Both ways: no crowded class without a reason, and no reason without a crowded class."""
    assert crowded_classes(PACKAGE) == set(MANY_ATTRIBUTES)


def test_signatures_are_short() -> None:
    """More than four positional parameters: the rest are named at the call."""
    assert [breach for breach in crowded_signatures(PACKAGE) if not excused(breach)] == []


def test_the_engine_rooms_can_be_read_in_a_day() -> None:
    rooms = (PACKAGE / room for room in ENGINE_ROOMS)
    assert (
        sum(module.num_code_lines for room in rooms for module in modules(room)) < MAX_ENGINE_ROOMS
    )


def test_code_is_counted_without_prose(tmp_path: Path) -> None:
    text = '"""One\ntwo."""\n\nx = 1  # three\n# four\ny = """\nfive\n"""\n'
    assert [module.num_code_lines for module in modules(write(tmp_path, text))] == [4]


def write(folder: Path, text: str, name: str = "a.py") -> Path:
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("suffix", "limit"), MAX_FILE.items())
def test_a_long_file_is_seen(tmp_path: Path, suffix: str, limit: int) -> None:
    assert long_files(write(tmp_path, "\n" * limit, "a" + suffix)) == []
    assert long_files(write(tmp_path, "\n" * (limit + 1), "a" + suffix)) == [
        f"a{suffix}: {limit + 1}"
    ]


def test_a_long_function_is_seen(tmp_path: Path) -> None:
    assert long_functions(write(tmp_path, "def f():\n" + "    pass\n" * 79)) == []
    assert long_functions(write(tmp_path, "async def f():\n" + "    pass\n" * 80)) == ["a.py: f"]


def test_a_crowded_class_is_seen(tmp_path: Path) -> None:
    names = [f"a{i}" for i in range(16)]
    body = "".join(f"        self.{name} = 0\n" for name in names)
    assert crowded_classes(write(tmp_path, f"class A:\n    def f(self):\n{body}")) == {"A"}
    fields = "".join(f"    {name}: int\n" for name in names)
    assert crowded_classes(write(tmp_path, f"@dataclass\nclass B:\n{fields}")) == {"B"}
    assert crowded_classes(write(tmp_path, f"@dataclass(frozen=True)\nclass C:\n{fields}")) == set()
    assert crowded_classes(write(tmp_path, f"class D:\n    __slots__ = {names!r}\n")) == {"D"}


def test_a_crowded_signature_is_seen(tmp_path: Path) -> None:
    assert crowded_signatures(write(tmp_path, "def f(a, b, c, d, *, e): ...\n")) == []
    assert crowded_signatures(write(tmp_path, "def f(a, b, /, c, d, e): ...\n")) == ["a.py: f"]
    method = "class A:\n    def f(self, a, b, c, d{}): ...\n"
    assert crowded_signatures(write(tmp_path, method.format(""))) == []
    assert crowded_signatures(write(tmp_path, method.format(", e"))) == ["a.py: f"]
