"""min_p, top-k and top-p: which tokens of a row stay, in one order: value descending, id ascending.

Everywhere here `scaled` [N] float32 is logits after temperature, minus their maximum: the best
token stands at exactly 0, and exp(scaled) is its probability up to a common factor. There are no
NaNs; barred tokens are -inf.

Nothing sorts a whole vocabulary if it can help it: `_floor` finds, from the maxima of columns, a
value that many tokens are known to reach, and only those are looked at. What is kept is the same.
"""

from __future__ import annotations

import math

import numpy as np

from ..kernels.api import Array
from ..sampling_params import SamplingParams

_COLUMN = 64
_SMALL = 4096
"""Up to this many values, looking at all of them costs less than choosing where to look."""
_TOP_P_HEAD = 256
"""Tokens that top-p looks at first."""
FIXED_POINT_BITS = 40
"""Weights of top-p are whole multiples of 2**-40 of the best token's: their sum, below 2**63 for
any vocabulary, is exact, so it can't depend on the order of summation."""
_INTEGER_MAGIC = 2.0**52
"""Adding this to 0 <= x < 2**52 rounds x to an integer and leaves it in the low 52 bits."""


def truncate(scaled: Array, params: SamplingParams) -> Array | None:
    """Ids, ascending, of what min_p, then top-k, then top-p leave (R79); None for everything."""
    ids: Array | None = None
    if params.min_p > 0:
        ids = np.flatnonzero(scaled >= min_p_floor(params.min_p))
        scaled = scaled[ids]
    if 0 < params.top_k < scaled.size:
        best = best_tokens(scaled, params.top_k)
        ids = best if ids is None else ids[best]
        scaled = scaled[best]
    if params.top_p < 1:
        best = best_tokens(scaled, num_top_p(scaled, params.top_p))
        ids = best if ids is None else ids[best]
    return ids


def min_p_floor(min_p: float) -> np.float32:
    """The least `scaled` value that min_p keeps: p >= min_p * p_max <=> scaled >= log(min_p).

    Rounded up to float32, so that comparing in float32 is comparing with the exact logarithm.
    At most 0: the best token always stays (R78).
    """
    exact = math.log(min_p)
    floor = np.float32(exact)
    return floor if float(floor) >= exact else np.nextafter(floor, np.float32(np.inf))


def best_tokens(values: Array, num: int) -> Array:
    """Indices, ascending, of the `num` best of values [N], by value descending, index ascending."""
    if num >= values.size:
        return np.arange(values.size)
    floor = _floor(values, num)
    if floor is None:
        return _select(values, num)
    reached = np.flatnonzero(values >= floor)
    best: Array = reached[_select(values[reached], num)]
    return best


def _select(values: Array, num: int) -> Array:
    """best_tokens for num <= N, looking at all values."""
    last = np.partition(values, values.size - num)[values.size - num]
    above = np.flatnonzero(values > last)
    ties = np.flatnonzero(values == last)[: num - above.size]
    return np.sort(np.concatenate([above, ties]))


def num_top_p(scaled: Array, top_p: float) -> int:
    """How many tokens, best first, top_p keeps: each while the sum before it is < top_p (R81).

    At least one. Exact: the sums are integers and top_p is the fraction that its float64 is.
    """
    weights = fixed_point_weights(scaled)
    numerator, denominator = top_p.as_integer_ratio()
    limit = -(-numerator * int(weights.sum()) // denominator)
    floor = _floor(scaled, _TOP_P_HEAD)
    if floor is not None:
        reached = np.flatnonzero(scaled >= floor)
        if int(weights[reached].sum()) >= limit:
            scaled = scaled[reached]
    # Negated twice instead of reversed: all arithmetic stays on contiguous arrays.
    weights = fixed_point_weights(-np.sort(-scaled))
    sum_before = np.cumsum(weights) - weights
    return int(np.searchsorted(sum_before, limit, side="left"))


def fixed_point_weights(scaled: Array) -> Array:
    """[N] int64: exp(scaled) in multiples of 2**-FIXED_POINT_BITS, rounded to nearest."""
    weights = np.exp(scaled, dtype=np.float64)
    weights *= 2.0**FIXED_POINT_BITS
    weights += _INTEGER_MAGIC  # a plain cast to int64 takes twice the time of the exp
    integers: Array = weights.view(np.int64)
    integers &= 2**52 - 1
    return integers


def _floor(values: Array, num: int) -> np.float32 | None:
    """A value that at least `num` of values [N] reach, near the num-th best; None: look at all."""
    num_columns = values.size // _COLUMN
    if values.size <= _SMALL or 2 * num > num_columns:
        return None
    table = values[: num_columns * _COLUMN].reshape(_COLUMN, num_columns)
    maxima = table.max(axis=0)
    floor: np.float32 = np.partition(maxima, num_columns - num)[num_columns - num]
    return floor
