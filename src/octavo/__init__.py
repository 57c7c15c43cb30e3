"""Octavo: an LLM inference engine to read in a day and to run without a GPU.

from octavo import LLM, SamplingParams
print(LLM().generate("The capital of France is", SamplingParams(temperature=0)))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM
    from .engine.llm import LLM
    from .sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": ".engine.llm",
    "AsyncLLM": ".engine.async_llm",
    "SamplingParams": ".sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import octavo` costs nothing."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
