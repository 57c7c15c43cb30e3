"""The CPU backend: C++ kernels (csrc/), one build per instruction-set level, chosen at run time."""

from __future__ import annotations

from ...errors import ConfigError
from .isa import available_levels, choose_level
from .ops import FLOAT32, CpuKernels, resolve_dtype
from .threads import available_cpus, set_threads

__all__ = ["CpuKernels", "available_cpus", "available_levels", "make_kernels"]


def make_kernels(
    threads: int | None = None,
    isa: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
) -> CpuKernels:
    """Make the op table of this machine.

    threads: size of the process-wide team (None: every CPU that this process may use).
    isa: a level of available_levels() (None: the environment's OCTAVO_ISA, else the best).
    dtype: of activations, weights and KV cache; "auto" is bfloat16.
    quantization: "int8" brings every linear weight to int8, with one scale per row;
        "stored" keeps weights that a model file holds quantised as they are. None does the same
        on AMX, where the answers are those of weights widened at load.
    Raises ConfigError.
    """
    level = choose_level(isa)
    resolved = resolve_dtype(dtype)
    known = quantization in (None, "int8", "stored")
    if not known or (quantization is not None and resolved == FLOAT32):
        wanted = "int8 or stored, with the dtype auto or bfloat16"
        raise ConfigError("quantization", quantization, wanted)
    set_threads(threads)
    return CpuKernels(level, resolved, quantization=quantization)
