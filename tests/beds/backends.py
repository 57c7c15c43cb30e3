"""Which backends the tests run on: every one there is, always; none is skipped in silence.

Set OCTAVO_TEST_BACKENDS=reference (comma-separated names) to work on one without building the
others; what `make test` runs is never filtered.
"""

from __future__ import annotations

import os

from octavo.kernels.api import BACKENDS, Kernels, load_backend

TEST_BACKENDS = os.environ.get("OCTAVO_TEST_BACKENDS", ",".join(BACKENDS)).split(",")

LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.6}
"""How far the largest error of the tiny models' logits (their standard deviation is 3) may be
from float64, by dtype. Rounding weights, norms and K/V to bfloat16 alone costs them up to 0.3."""

_loaded: dict[str, Kernels] = {}


def kernels_of(name: str) -> Kernels:
    """The op table of one backend with its own defaults, made once."""
    if name not in _loaded:
        _loaded[name] = load_backend(name)
    return _loaded[name]


def logit_tolerance(kernels: Kernels) -> float:
    """Largest distance from float64 that this backend's number format excuses."""
    return LOGIT_TOLERANCE[str(kernels.dtype)]
