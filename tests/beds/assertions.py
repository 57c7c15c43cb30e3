"""Which assertions a function makes, so that a test can tell whether it has seen each of them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable


def texts(*functions: Callable[..., object]) -> list[str]:
    """What the asserts of these functions say, as far as it is written down."""
    found: list[str] = []
    for function in functions:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                parts = ast.walk(node.msg) if node.msg is not None else ()
                constants = [part.value for part in parts if isinstance(part, ast.Constant)]
                found.append("".join(text for text in constants if isinstance(text, str)))
    return found


def unseen(said: Iterable[str], *functions: Callable[..., object]) -> list[str]:
    """Assertions that none of the messages in `said` came from."""
    return [text for text in texts(*functions) if not any(part in text for part in said)]
