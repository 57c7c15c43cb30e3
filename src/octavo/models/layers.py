"""What decoders are made of besides the ops: loading weights packed, and the rotary cache."""

from __future__ import annotations

import math

import numpy as np

from ..checkpoint import ModelConfig, RopeScaling, Weights
from ..errors import ModelLoadError
from ..kernels.api import Array, Kernels, Linear


class WeightLoader:
    """Reads tensors one at a time and packs each for its backend.

    At no time is more than one weight alive unpacked, so peak memory stays near the final.
    """

    def __init__(self, weights: Weights, kernels: Kernels) -> None:
        self._weights = weights
        self._kernels = kernels
        self.nbytes = 0
        """Bytes of the packed weights so far."""

    def linear(self, *parts: tuple[str, int], in_features: int) -> Linear:
        """One Linear of the named weights [out_features, in_features], stacked along N.

        `parts` are (tensor name, out_features). Fusing q, k, v or gate, up like this makes one
        wide product of several (R38, R57).
        """
        packed = self._kernels.pack_once(
            f"{parts} x {in_features}",
            lambda: self._stored(parts, in_features) or self._dequantised(parts, in_features),
        )
        self.nbytes += packed.nbytes
        return packed

    def _stored(self, parts: tuple[tuple[str, int], ...], in_features: int) -> Linear | None:
        """From what the file holds, where the backend takes all these formats."""
        found = []
        for name, rows in parts:
            self._check(name, (rows, in_features))
            stored = self._weights.load_stored(name, self._kernels.stored_kinds)
            if stored is None:
                return None
            found.append(stored)
        return self._kernels.pack_stored(found, in_features)

    def _dequantised(self, parts: tuple[tuple[str, int], ...], in_features: int) -> Linear:
        out_features = sum(rows for _, rows in parts)
        stacked = np.empty((out_features, in_features), np.float32)
        row = 0
        for name, rows in parts:
            self._load(name, stacked[row : row + rows])
            row += rows
        return self._kernels.pack_linear(stacked)

    def vector(self, name: str, size: int) -> Array:
        """One norm weight [size]."""
        packed = self._kernels.pack_vector(self._load(name, np.empty(size, np.float32)))
        self.nbytes += packed.nbytes
        return packed

    def _load(self, name: str, out: Array) -> Array:
        self._check(name, out.shape)
        return self._weights.load(name, out=out)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self._weights.shape(name))
        if found != shape:
            raise ModelLoadError(
                f"tensor {name} has the shape {list(found)}, but the model's configuration says "
                f"{list(shape)}: the file is damaged, or its configuration is another model's"
            )


def build_cos_sin_cache(config: ModelConfig, max_position: int) -> Array:
    """cos_sin_cache [max_position, rotary_dim] float32, for the whole life of the model (R40).

    Row p holds cos(p * f_i), then sin(p * f_i), i < rotary_dim / 2, computed in float64.
    """
    angles = np.outer(np.arange(max_position, dtype=np.float64), rotary_frequencies(config))
    half = angles.shape[1]
    cache = np.empty((max_position, 2 * half), np.float32)
    cache[:, :half] = np.cos(angles)
    cache[:, half:] = np.sin(angles)
    return cache


def rotary_frequencies(config: ModelConfig) -> Array:
    """[rotary_dim / 2] float64: radians per position of each pair, theta^(-2i / D), scaled."""
    rotary_dim = config.head_dim
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    if scaling.kind == "factors":
        factors = np.asarray(scaling.factors, np.float64)
        if factors.shape != frequencies.shape or not np.all(factors > 0):
            raise ModelLoadError(
                f"rope scaling has {factors.size} factors, but needs {frequencies.size} above zero"
            )
        return frequencies / factors
    raise ModelLoadError(
        f"rope scaling {scaling.kind!r} is not supported; supported: linear, llama3, factors"
    )


def _llama3_frequencies(frequencies: Array, scaling: RopeScaling) -> Array:
    """Llama 3.1's rule: long waves are stretched by `factor`, short ones kept, a ramp between.

    A wave is long or short by how often it turns within the original context.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(ramp, 0, 1)  # 1 = as trained, 0 = stretched
    stretched: Array = frequencies * (kept + (1 - kept) / scaling.factor)
    return stretched
