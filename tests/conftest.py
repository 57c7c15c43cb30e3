"""Hypothesis profiles (`ci` is derandomised and without deadline; `fuzz` explores), the model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("fuzz", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def model_file() -> Path:
    """SmolLM2-135M: $OCTAVO_TEST_MODEL, else from Octavo's cache, fetched first if need be."""
    if own := os.environ.get("OCTAVO_TEST_MODEL"):
        return Path(own)
    from octavo.weights.sources import open_checkpoint

    return open_checkpoint("smollm2-135m").path
