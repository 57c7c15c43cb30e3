"""Counter-based noise: a function of (seed, position, token id), and random all the same."""

from __future__ import annotations

import numpy as np
import pytest

from beds.chi_square import chi_square, critical_value
from beds.reference_sampler import uniform
from octavo.sampling.noise import exponential, random_bits

IDS = np.arange(4096)


def unevenness(bits: np.ndarray) -> float:
    """Chi-square of 32-bit draws in 256 bins."""
    counts = np.bincount((bits >> np.uint64(24)).astype(np.int64), minlength=256)
    return chi_square(counts, np.full(256, 1 / 256))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (2**64 - 1, 131071), (77, 12)])
def test_bits_are_those_of_the_definition(seed: int, position: int) -> None:
    """C35: any 64-bit seed. Against splitmix64 in Python integers."""
    ids = np.array([0, 1, 2, 49151, 151935])
    bits = random_bits(seed, position, ids)
    assert ((bits.astype(float) + 0.5) / 2**32).tolist() == [
        uniform(seed, position, i) for i in ids.tolist()
    ]


def test_a_token_draws_the_same_alone_and_among_others() -> None:
    """A subset of the tokens sees the noise of the whole vocabulary."""
    whole = random_bits(9, 4, IDS)
    some = np.array([4000, 3, 77])
    np.testing.assert_array_equal(random_bits(9, 4, some), whole[some])


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_bits_are_uniform_along_every_coordinate(along: str) -> None:
    """R82: 200,000 draws in 256 bins; nearby seeds and positions are as good as any."""
    if along == "tokens":
        bits = random_bits(5, 17, np.arange(200_000))
    elif along == "positions":
        bits = np.concatenate([random_bits(5, position, IDS[:20]) for position in range(10_000)])
    else:
        bits = np.concatenate([random_bits(seed, 17, IDS[:20]) for seed in range(10_000)])
    assert unevenness(bits) < critical_value(255, 1e-6)


@pytest.mark.parametrize("step", ["token", "position", "seed"])
def test_neighbouring_draws_are_independent(step: str) -> None:
    """Pairs (draw, next draw) fill a 16 x 16 grid evenly, and half of the bits differ."""
    pairs = []
    for i in range(50):
        here = random_bits(i, 2 * i, IDS[:-1])
        there = {
            "token": random_bits(i, 2 * i, IDS[1:]),
            "position": random_bits(i, 2 * i + 1, IDS[:-1]),
            "seed": random_bits(i + 1, 2 * i, IDS[:-1]),
        }[step]
        pairs.append((here, there))
    here, there = (np.concatenate(side) for side in zip(*pairs, strict=True))
    cells = (here >> np.uint64(28)) * np.uint64(16) + (there >> np.uint64(28))
    assert unevenness(cells << np.uint64(24)) < critical_value(255, 1e-6)
    differing = np.unpackbits((here ^ there).view(np.uint8)).sum() / here.size
    assert differing == pytest.approx(16, abs=0.05)  # its standard error is 0.006


def test_seed_and_position_are_not_interchangeable() -> None:
    grid = [
        random_bits(seed, position, IDS[:2]).tobytes()
        for seed in range(40)
        for position in range(40)
    ]
    assert len(set(grid)) == 1600


def test_exponential_is_exp_1_and_never_zero_or_infinite() -> None:
    """R82: mean 1, variance 1; the extreme bits stay inside (0, 23)."""
    draws = exponential(random_bits(1, 1, np.arange(200_000)))
    assert draws.mean() == pytest.approx(1, abs=0.015)  # 6 standard errors
    assert draws.var() == pytest.approx(1, abs=0.04)
    least, greatest = exponential(np.array([0, 2**32 - 1], np.uint64))
    assert least == pytest.approx(2.0**-33)
    assert greatest == pytest.approx(33 * np.log(2))
