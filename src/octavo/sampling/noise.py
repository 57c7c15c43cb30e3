"""Randomness without a generator: a hash of (request seed, position, token id).

A draw depends on nothing but its three coordinates, so there is no state to lose when a request
is preempted, moved to another row or batched with others. The hash is splitmix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", 2014): its counter is the token id,
its start a mix of seed and position.
"""

from __future__ import annotations

import numpy as np

from ..kernels.api import Array

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION_GAMMA = 0xD1342543DE82EF95
"""Another odd constant than _GAMMA: positions must not walk along the token ids' sequence."""


def mix64(z: int) -> int:
    """splitmix64's finaliser on one Python integer: a bijection of 64 bits."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int, position: int) -> int:
    """Where in the 2**64 cycle the token ids of one (seed, position) start."""
    return mix64(mix64(seed + _GAMMA) + (position + 1) * _POSITION_GAMMA)


def token_counters(token_ids: Array) -> Array:
    """[N] uint64: the part of the hash's input that depends on the token alone."""
    return token_ids.astype(np.uint64) * np.uint64(_GAMMA)


def hash_tokens(seed: int, position: int, counters: Array, *, scratch: Array, out: Array) -> None:
    """out[N] uint64 = 32 random bits for each of counters [N] (from token_counters)."""
    np.add(counters, np.uint64(stream_key(seed, position)), out=out)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(out, np.uint64(shift), out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        np.multiply(out, np.uint64(factor), out=out)
    # The finaliser's last step, z ^ (z >> 31), would leave bits 33 and above as they are.
    np.right_shift(out, np.uint64(32), out=out)


def random_bits(seed: int, position: int, token_ids: Array) -> Array:
    """[N] uint64, each below 2**32: the hash of (seed, position, token id)."""
    counters = token_counters(token_ids)
    hash_tokens(seed, position, counters, scratch=np.empty_like(counters), out=counters)
    return counters


def exponential(bits: Array) -> Array:
    """[N] float64 draws of Exp(1): q = -log1p(-u), u = (bits + 1/2) / 2**32, so 0 < q < 23."""
    return -np.log1p(-((bits.astype(np.float64) + 0.5) * 2.0**-32))
