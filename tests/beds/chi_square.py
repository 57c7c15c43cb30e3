"""Pearson's test without a statistics package."""

from __future__ import annotations

from typing import Any

import numpy as np

Z = {1e-4: 3.719, 1e-6: 4.753}
"""Standard normal quantiles of 1 minus the key."""


def critical_value(degrees: int, probability: float) -> float:
    """Chi-square value exceeded with `probability` (Wilson and Hilferty's approximation, 1931)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + Z[probability] * spread**0.5) ** 3)


def chi_square(counts: Any, probabilities: Any) -> float:
    """Statistic of counts [N] against probabilities [N], over the possible outcomes."""
    expected = np.asarray(probabilities) * np.sum(counts)
    possible = expected > 0
    return float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
