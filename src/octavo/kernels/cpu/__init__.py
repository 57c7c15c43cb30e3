"""The CPU backend: C++ kernels (csrc/), one build per instruction-set level, chosen at run time."""

from __future__ import annotations

from ...errors import ConfigError
from ._native import decodes_stored, set_huge_pages
from .isa import available_levels, choose_level
from .ops import FLOAT32, CpuKernels, resolve_dtype
from .threads import available_cpus, set_threads

__all__ = ["CpuKernels", "available_cpus", "available_levels", "make_kernels"]


def make_kernels(
    threads: int | None = None,
    isa: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    packed_cache: str = "off",
    huge_pages: bool = True,
) -> CpuKernels:
    """Make the op table of this machine.

    threads: size of the process-wide team (None: every CPU that this process may use).
    isa: a level of available_levels() (None: the environment's OCTAVO_ISA, else the best).
    dtype: of activations, weights and KV cache; "auto" is bfloat16.
    quantization: "int8" brings every linear weight to int8, with one scale per row;
        "stored" keeps weights that a model file holds quantised as they are. None does the same
        on AMX with the dtype "auto": the answers are those of weights widened at load.
    packed_cache: auto, map, copy or off; see packed.py.
    huge_pages: ask for them, for what is allocated from now on.
    Raises ConfigError.
    """
    level = choose_level(isa)
    resolved = resolve_dtype(dtype)
    known = quantization in (None, "int8", "stored")
    if not known or (quantization is not None and resolved == FLOAT32):
        wanted = "int8 or stored, with the dtype auto or bfloat16"
        raise ConfigError("quantization", quantization, wanted)
    if quantization is None and dtype == "auto" and decodes_stored(level):
        quantization = "auto"
    set_threads(threads)
    set_huge_pages(huge_pages)
    return CpuKernels(level, resolved, quantization=quantization, packed_cache=packed_cache)
