"""Flags made from the settings: one per field of octavo.config, its docstring as the help.

Names are vLLM's, with dashes or underscores. Only flags that were given reach make_config, so a
default is stated once, in the config class.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from ..config import PARTS, TOP, EngineConfig, field_docs, make_config

DEFAULT_MODEL = "smollm2-135m"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SETTING = "setting_"  # dest prefix, so that a setting never meets another flag's dest


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what may have been meant."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def print_help(self, file: Any = None) -> None:
        """argparse's own swallows errors of writing, which a help longer than a buffer can meet."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def refuse_unknown(self, unknown: list[str]) -> NoReturn:
        """Exit 2, naming the first argument that no command knows."""
        name = unknown[0].partition("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        close = difflib.get_close_matches(name, known, n=1)
        self.error(f"unknown argument {name}" + (f": did you mean {close[0]}?" if close else ""))


def normalise(arguments: Iterable[str]) -> list[str]:
    """--max_num_seqs as --max-num-seqs; values, and all after a lone --, stay as they are."""
    result: list[str] = []
    literal = False
    for argument in arguments:
        literal = literal or argument == "--"
        if argument.startswith("--") and not literal:
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


def size(text: str) -> int:
    """A whole number, with k, m, g or t for powers of 1024: 512m, 8k, 1.5g."""
    match = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)\s*([kmgt])(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number (like 4096, 8k, 512m or 1.5g)")
    if match[1]:
        return int(match[1])
    whole, _, part = match[2].partition(".")
    scale: int = 10 ** len(part)
    return int(whole + part) * _UNITS[match[3]] // scale


def seconds(text: str) -> float:
    """A time from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or above")
    return value


def filled(text: str) -> str:
    """A text that is not empty: an unset variable of a shell must not choose for the user."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a name, or leave it out")
    return text


def seed(text: str) -> int:
    """A whole number that fits in 63 bits."""
    if not re.fullmatch(r"\d{1,19}", text) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from 0 to 2**63-1")
    return int(text)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """MODEL and a flag for every setting of the engine."""
    text = f"{field_docs(EngineConfig)['model']} Default: {DEFAULT_MODEL}."
    parser.add_argument("model", nargs="?", type=filled, metavar="MODEL", help=text)
    parser.add_argument(
        "--model", dest="model_flag", type=filled, metavar="MODEL", help=argparse.SUPPRESS
    )
    titles = {"backend": "backend", "scheduler": "scheduler", "cache": "KV cache"}
    for part in ("backend", "scheduler", "cache"):
        group = parser.add_argument_group(titles[part])
        _add_fields(group, PARTS[part])
        if part == "backend":
            _add_fields(group, EngineConfig, only=TOP[1:])


def _add_fields(group: Any, cls: type, only: tuple[str, ...] | None = None) -> None:
    docs = field_docs(cls)
    for field in fields(cls):
        if only is not None and field.name not in only:
            continue
        text = docs[field.name].replace("%", "%%")
        if field.default not in (None, MISSING) and "Default:" not in text:
            text += f" Default: {_shown(field.default)}."
        kwargs: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        kwargs["dest"] = _SETTING + field.name
        kind = str(field.type)
        if kind == "bool":
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            whole = seed if field.name == "seed" else size
            number = whole if kind.startswith("int") else float
            is_number = kind.startswith(("int", "float"))
            kwargs["type"], kwargs["metavar"] = (number, "N") if is_number else (str, "NAME")
        group.add_argument("--" + field.name.replace("_", "-"), **kwargs)


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def model_of(args: argparse.Namespace) -> str:
    """The model asked for: the positional MODEL, --model, or the default."""
    return str(args.model or args.model_flag or DEFAULT_MODEL)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line, by name, without the model."""
    return {
        name.removeprefix(_SETTING): value
        for name, value in vars(args).items()
        if name.startswith(_SETTING)
    }


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The checked configuration. Raises ConfigError."""
    return make_config(model=model_of(args), **settings_of(args))


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags for SamplingParams; greedy unless a temperature is given."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=size,
        metavar="N",
        help=f"Tokens to generate at most. Default: {max_tokens}, or what the limits leave.",
    )
    group.set_defaults(default_max_tokens=max_tokens)
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 (the default) takes the most likely token; above 0 samples.",
    )
    unset = argparse.SUPPRESS
    group.add_argument(
        "--top-p",
        type=float,
        default=unset,
        metavar="P",
        help="Keep the most likely tokens until their probabilities sum to P.",
    )
    group.add_argument(
        "--top-k", type=int, default=unset, metavar="K", help="Keep the K most likely tokens."
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=unset,
        metavar="P",
        help="Drop tokens less likely than P times the most likely one.",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=unset,
        metavar="TEXT",
        help="End the answer before TEXT; may be given several times.",
    )


SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")


def sampling_of(args: argparse.Namespace, max_output_tokens: int) -> dict[str, Any]:
    """The sampling parameters given, temperature and max_tokens always among them.

    A default that nobody asked for gives way to `max_output_tokens`, what the limits leave.
    """
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if hasattr(args, name)}
    if args.max_tokens is None:
        given["max_tokens"] = max(1, min(args.default_max_tokens, max_output_tokens))
    return given
