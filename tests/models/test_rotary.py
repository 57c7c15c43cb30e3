"""The rotary cache and the elementwise rotation against the papers' matrices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from beds.backends import TEST_BACKENDS, kernels_of
from beds.dense_llama import rotate
from beds.tiny_llama import TIED, VARIANTS
from octavo.checkpoint import RopeScaling
from octavo.errors import ModelLoadError
from octavo.models.layers import build_cos_sin_cache, rotary_frequencies


@pytest.mark.parametrize("backend", TEST_BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_elementwise_rotation_equals_the_block_diagonal_matrix(backend: str, variant: str) -> None:
    """R39: sin/cos elementwise, never a matrix product; both forms agree."""
    config = VARIANTS[variant]
    cache = build_cos_sin_cache(config, 256)
    rng = np.random.default_rng(0)
    positions = np.array([0, 1, 17, 200, 255], np.int32)
    shape = (5, config.num_attention_heads, config.head_dim)
    query = rng.standard_normal(shape).astype(np.float32)
    key = rng.standard_normal(shape).astype(np.float32)[:, : config.num_key_value_heads]
    wanted_query, wanted_key = (
        [[rotate(config, head, p) for head in heads] for heads, p in zip(x, positions, strict=True)]
        for x in (query.astype(np.float64), key.astype(np.float64))
    )
    kernels_of(backend).rotary_embedding(positions, query, key, cache)
    np.testing.assert_allclose(query, wanted_query, atol=1e-5)
    np.testing.assert_allclose(key, wanted_key, atol=1e-5)


def test_the_cache_is_indexed_by_position_and_sized_once() -> None:
    """R40, R41: [max_position, rotary_dim] float32; Llama 3's is 4 MiB per 8,192 positions."""
    config = replace(TIED, head_dim=128, rope_theta=500000.0)
    cache = build_cos_sin_cache(config, 8192)
    assert cache.shape == (8192, 128)
    assert cache.dtype == np.float32
    assert cache.nbytes == 4 * 2**20
    angle = 8191 * 500000.0 ** (-2 * 10 / 128)
    np.testing.assert_allclose(cache[8191, [10, 74]], [np.cos(angle), np.sin(angle)], atol=1e-7)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """Llama 3.1's own numbers: ends of the ramp are exact, and the middle is in between."""
    config = replace(
        TIED,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    )
    plain = rotary_frequencies(replace(config, rope_scaling=None))
    ratio = plain / rotary_frequencies(config)
    assert (ratio[:29] == 1).all()  # waves under 2,048 positions
    assert (ratio[36:] == 8).all()  # waves over 8,192 positions
    assert ((ratio[29:35] > 1) & (ratio[29:35] < 8)).all()
    assert (np.diff(ratio) >= 0).all()


def test_factors_of_the_wrong_number_are_refused() -> None:
    scaling = RopeScaling(kind="factors", factors=(1.0, 2.0))
    with pytest.raises(ModelLoadError, match="2 factors, but needs 8"):
        rotary_frequencies(replace(TIED, rope_scaling=scaling))


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="'yarn' is not supported; supported: linear"):
        rotary_frequencies(replace(TIED, rope_scaling=RopeScaling(kind="yarn")))
