"""Imports run one way: the law of the house, and that the check sees a breach."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.tree import PACKAGE, modules

# What each room may import, besides itself and the leaf types (the modules beside __init__.py).
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "kernels": set(),
    "weights": set(),
    "models": {"kernels"},
    "sampling": {"kernels"},
    "worker": {"kernels", "models", "sampling"},
    "engine": {"core", "worker.executor"},
    "sim": {"core", "worker.executor"},
    "trace": {"core", "worker.executor"},
    "server": {"core", "engine"},
    "cli": {
        "trace",
        "core",
        "engine",
        "sim",
        "server",
        "weights",
        "worker",
        "kernels",
        "models",
        "sampling",
    },
}
COMPOSITION_ROOTS = {
    "engine/build.py": {"weights", "worker", "trace"},
    "__main__.py": {"cli"},
}
"""Where rooms are wired together, and what each may import beyond its room's law."""

DYNAMIC = {"__init__.py", "kernels/api.py", "models/registry.py", "cli/main.py"}
"""Where modules are imported by name: on demand, from a table beside the call."""

# A decision that reads a clock, draws a number or waits can't be replayed.
NOT_IN_CORE = {"time", "datetime", "random", "secrets", "threading", "asyncio", "queue", "socket"}
NOT_IN_CORE |= {"multiprocessing", "concurrent", "subprocess", "uuid", "signal", "ctypes"}


def imports_of(name: str, tree: ast.Module) -> Iterator[str]:
    """Absolute names of everything that a module of the package imports, lazily or not."""
    parents = ["octavo", *name.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            whole = [*base, *(node.module or "").split(".")]
            for alias in node.names:
                yield ".".join(part for part in [*whole, alias.name] if part)


def imports_by_name(tree: ast.Module) -> bool:
    """Whether a module calls import_module() or __import__(), which imports_of can't follow."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (getattr(func, "attr", getattr(func, "id", None)) for func in calls)
    return any(name in ("import_module", "__import__") for name in names)


def within(target: str, allowed: set[str]) -> bool:
    return any(target == name or target.startswith(name + ".") for name in allowed)


def breaches(package: Path) -> list[str]:
    """Every import that the law forbids, as "file: what"."""
    found: list[str] = []
    leaves = {path.stem for path in package.glob("*.py")} - {"__init__"}
    for module in modules(package):
        room = module.name.partition("/")[0] if "/" in module.name else ""
        if room and room not in ROOMS:
            found.append(f"{module.name}: room {room} has no law")
            continue
        allowed = leaves | ({room} | ROOMS[room] if room else set())
        allowed |= COMPOSITION_ROOTS.get(module.name, set())
        if module.name == "__init__.py":
            allowed |= {"engine.llm", "engine.async_llm"}
        if imports_by_name(module.tree) and module.name not in DYNAMIC:
            found.append(f"{module.name}: imports by name")
        for target in imports_of(module.name, module.tree):
            top, _, rest = target.partition(".")
            if top == "octavo":
                if not within(rest, allowed) and rest != "__version__":
                    found.append(f"{module.name}: {rest}")
            elif room == "core" and (top not in sys.stdlib_module_names or top in NOT_IN_CORE):
                found.append(f"{module.name}: {top}")
    return found


def test_imports_run_one_way() -> None:
    """Leaf types <- core <- engine <- server, cli; kernels <- models, sampling <- worker."""
    assert breaches(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("core/a.py", "import numpy as np"),
        ("core/a.py", "from time import monotonic"),
        ("core/a.py", "import random"),
        ("core/a.py", "from ..engine import llm"),
        ("core/a.py", "from .. import worker"),
        ("worker/a.py", "from ..core.scheduler import Scheduler"),
        ("worker/a.py", "def f():\n    from octavo.core import scheduler"),
        ("weights/a.py", "from ..models import registry"),
        ("engine/a.py", "from ..worker.local import LocalExecutor"),
        ("engine/a.py", "from ..weights.sources import open_checkpoint"),
        ("engine/build.py", "from ..server import serve"),
        ("engine/a.py", "import octavo.kernels.cpu"),
        ("server/a.py", "from ..worker import executor"),
        ("kernels/cpu/a.py", "from ...models import llama"),
        ("models/a.py", "from importlib import import_module\nimport_module('x')"),
        ("models/a.py", "import importlib\nimportlib.import_module('x')"),
        ("models/a.py", "__import__('octavo.core')"),
        ("errors.py", "from .core import scheduler"),
        ("attic/a.py", "import os"),
    ],
)
def test_a_forbidden_import_is_seen(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    assert len(breaches(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("core/a.py", "import heapq\nfrom collections import deque\nfrom . import b"),
        ("engine/a.py", "from ..worker.executor import Executor"),
        ("engine/build.py", "from ..worker.load import load_executor\nfrom ..weights import a"),
        ("cli/a.py", "from ..server.serve import serve"),
        ("kernels/cpu/a.py", "from ..api import Kernels\nimport numpy"),
        ("models/registry.py", "from importlib import import_module\nimport_module('x')"),
        ("server/a.py", "from importlib.resources import files"),
    ],
)
def test_a_lawful_import_passes(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    assert breaches(tmp_path) == []
