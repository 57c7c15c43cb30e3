"""Which instruction-set level runs: the best this machine has, or the one that is asked for."""

from __future__ import annotations

import os

from ...errors import ConfigError
from . import _native

ISA_VARIABLE = "OCTAVO_ISA"


def available_levels() -> list[str]:
    """Levels that this build has and this machine can run, best first."""
    return list(_native.available_levels())


def choose_level(isa: str | None) -> str:
    """Take `isa`, else the environment's OCTAVO_ISA, else the best level. Raises ConfigError."""
    levels = available_levels()
    field, wanted = "isa", isa
    if not wanted:
        field, wanted = ISA_VARIABLE, os.environ.get(ISA_VARIABLE)
    if not wanted or wanted == "auto":
        return levels[0]
    if wanted not in levels:
        raise ConfigError(field, wanted, f"one that this machine has: {', '.join(levels)}")
    return wanted
