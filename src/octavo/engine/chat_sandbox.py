"""Where chat templates run: a template in a model file is code from a stranger.

It is sandboxed (no Python internals, no changes to its inputs) and on a budget: what it writes
and how often it loops or calls is limited, so that no template can fill memory or run for ever.
"""

from __future__ import annotations

import functools
import json
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from .chat_messages import Placeholders

MAX_TEMPLATE_COST = 16 * 2**20
"""Characters that one rendering may make. A loop round costs what is written in it, tags and
names counting one each; a call or a filter costs CALL_COST."""

CALL_COST = 50

MAX_INTEGER = 10**7
"""Largest number that a template may hand to a function, as a width or a count."""


class _Rendering:
    """What one rendering has left to spend, and the stand-ins in its texts."""

    def __init__(self, placeholders: Placeholders) -> None:
        self.left = MAX_TEMPLATE_COST
        self.placeholders = placeholders

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise jinja2.TemplateRuntimeError("it writes or loops without end")


_rendering: ContextVar[_Rendering] = ContextVar("rendering")


def _spend(cost: int) -> None:
    _rendering.get().spend(cost)


def render_on_budget(
    template: jinja2.Template, variables: Mapping[str, Any], placeholders: Placeholders
) -> str:
    """The template's whole output. Raises what the template raises, or a TemplateError."""
    token = _rendering.set(_Rendering(placeholders))
    try:
        pieces = []
        for piece in template.generate(**variables):
            _spend(len(piece))  # once more than _finalize did, since plain text has no other check
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _rendering.reset(token)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's settings, extensions and functions for templates, on a budget."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_finalize,
        )
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            self.filters[name] = _on_budget(name, function)
        self.filters.update(octavo_rounds=_rounds, octavo_join=_join)
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Write the budget into the template itself, where loops and joined texts are."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            inside = list(loop.find_all(nodes.Node))
            written = sum(len(x.data) for x in inside if isinstance(x, nodes.TemplateData))
            loop.iter = _filter("octavo_rounds", loop.iter, [nodes.Const(len(inside) + written)])
        for target in tree.find_all(nodes.NSRef):
            _check_names([target.attr])
        _replace_joins(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _spend(CALL_COST)
        if obj is self.globals["namespace"]:
            _check_names(kwargs.keys() - {"_loop_vars", "_block_vars"})  # these are Jinja's own
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            if obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
                _weigh([*args[0], *[text] * len(args[0])])
            _check_growth(obj.__name__, (text, *args), kwargs)
        else:
            _check_growth("", args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            _spend(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_growth("format", (left, right), {})
        elif isinstance(left, int | float) and isinstance(right, int | float):
            if operator != "+" and (abs(left) > MAX_INTEGER or abs(right) > MAX_INTEGER):
                raise SecurityError(f"{operator} on a number above {MAX_INTEGER}")
            if operator == "**" and abs(right) > 64:
                raise SecurityError("an exponent above 64")
        else:
            _spend(_size(left) * _size(right) if operator == "*" else _size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_growth("format", (value.__self__,), {})
        return wrapped


class _GenerationTag(Extension):
    """{% generation %}: marks the assistant's words for training; here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(name: str, value: nodes.Node, args: Sequence[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _replace_joins(node: nodes.Node) -> None:
    """a ~ b becomes a filter that looks at the budget first."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _replace_joins(child)
            if isinstance(child, nodes.Concat):
                children[i] = _filter("octavo_join", child.nodes[0], child.nodes[1:])
        if not isinstance(value, list):
            setattr(node, field, children[0])


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 1


def _check_names(names: Iterable[Any]) -> None:
    """Namespaces may hold no name that Python itself looks for."""
    if any(str(name).startswith("_") for name in names):
        raise SecurityError("names that begin with an underscore are not allowed")


def _check_growth(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what would make a huge value before it is made."""
    values = (*args, *kwargs.values())
    if any(isinstance(value, int) and abs(value) > MAX_INTEGER for value in values):
        raise SecurityError(f"a number above {MAX_INTEGER} as an argument")
    if name == "format" and args and re.search(r"\d{5}|\*", str(args[0])):
        raise SecurityError("a format with a width above 9999")
    if name == "replace" and len(args) > 2:
        text, old, new = map(str, args[:3])
        _spend(text.count(old) * len(new))


def _weigh(value: Any) -> None:
    """Pay for all the text in a value that is about to be written out: a short list may name
    the same long text a thousand times."""
    if isinstance(value, list | tuple | dict):
        for item in value:
            _weigh(item)
            if isinstance(value, dict):
                _weigh(value[item])
    else:
        _spend(len(value) if isinstance(value, str) else 1)


_WRITERS = frozenset(
    ("tojson", "string", "join", "pprint", "urlencode", "xmlattr", "escape", "e", "forceescape")
)
"""Filters that write out whole values."""


def _on_budget(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are checked and whose text is paid for."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _spend(CALL_COST)
        context = args[:1] if hasattr(function, "jinja_pass_arg") else ()
        given = args[len(context) :]
        if name == "join":
            items = list(given[0])
            given = (items, *given[1:])
            _spend(len(items) * len(str(kwargs.get("d", given[1] if len(given) > 1 else ""))))
        if name in _WRITERS:
            _weigh(given)
        _check_growth(name, given, kwargs)
        result = function(*context, *given, **kwargs)
        if isinstance(result, str):
            _spend(len(result))
        return result

    return bounded


def _rounds(items: Any, cost: int) -> Iterable[Any]:
    """The items to loop over, each paid for."""
    if hasattr(items, "__len__"):
        _spend(len(items) * cost)
        return items  # type: ignore[no-any-return]
    return _paid(items, cost)


def _paid(items: Iterable[Any], cost: int) -> Iterator[Any]:
    for item in items:
        _spend(cost)
        yield item


def _join(first: Any, *rest: Any) -> str:
    _weigh((first, *rest))
    return "".join(str(value) for value in (first, *rest))


@jinja2.pass_context  # the context is not used, but keeps Jinja from calling this at compile time
def _finalize(context: Context, value: Any) -> Any:
    _weigh(value)
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face has it: Jinja's own would escape HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        keep = _rendering.get().placeholders
        text = "".join(c if c.isascii() or c in keep else json.dumps(c)[1:-1] for c in text)
    return text
