"""Which backends the tests run on: every one there is, always; none is skipped in silence.

A backend is named as "cpu" (in its own number format), "cpu:float32" (in that one) or "cpu:int8".
Set OCTAVO_TEST_BACKENDS=reference (names separated by commas) to work on one without building the
others; what `make test` runs is never filtered.
"""

from __future__ import annotations

import os

from octavo.kernels.api import Kernels, load_backend

ALL_BACKENDS = "reference,cpu,cpu:float32"
TEST_BACKENDS = os.environ.get("OCTAVO_TEST_BACKENDS", ALL_BACKENDS).split(",")

LAW_BACKENDS = [*TEST_BACKENDS, "cpu:int8"] if "cpu" in TEST_BACKENDS else TEST_BACKENDS
"""Those whose answers must not depend on the batch: int8 is far from the tiny models' definition
(their logits move by up to 2 of a standard deviation of 3), but as free of neighbours as any."""

LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.6}
"""How far the largest error of the tiny models' logits (their standard deviation is 3) may be
from float64, by dtype. Rounding weights, activations and K/V to bfloat16 costs them up to 0.42."""

_loaded: dict[str, Kernels] = {}


def backend_settings(backend: str) -> dict[str, str]:
    """The settings (backend, dtype, quantization) that a name of TEST_BACKENDS stands for."""
    name, _, form = backend.partition(":")
    if form == "int8":
        return {"backend": name, "dtype": "auto", "quantization": form}
    return {"backend": name, "dtype": form or "auto"}


def kernels_of(backend: str) -> Kernels:
    """The op table that a name of TEST_BACKENDS stands for, made once."""
    if backend not in _loaded:
        settings = backend_settings(backend)
        _loaded[backend] = load_backend(settings.pop("backend"), **settings)
    return _loaded[backend]


def cpu_levels() -> list[str]:
    """Instruction-set levels of this machine; none while one works without the cpu backend."""
    if not any(name.startswith("cpu") for name in TEST_BACKENDS):
        return []
    from octavo.kernels.cpu import available_levels

    return available_levels()


def logit_tolerance(kernels: Kernels) -> float:
    """Largest distance from float64 that this backend's number format excuses."""
    return LOGIT_TOLERANCE[str(kernels.dtype)]
