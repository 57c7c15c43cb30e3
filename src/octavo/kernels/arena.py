"""Scratch memory of one step: a bump allocator over chunks that are kept between steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .api import Array

ALIGNMENT = 64
CHUNK_BYTES = 1 << 20


class NumpyArena:
    """kernels.api.Arena over host memory."""

    def __init__(self) -> None:
        self._chunks: list[Array] = []
        self._index = 0
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised array, aligned to 64 bytes, valid until reset()."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        start = self._reserve(size)
        chunk = self._chunks[self._index]
        array: Array = chunk[start : start + size].view(kind).reshape(shape)
        return array

    def reset(self) -> None:
        """Start over; memory is kept for the next step."""
        self._index = 0
        self._used = 0

    def _reserve(self, size: int) -> int:
        while self._index < len(self._chunks):
            if self._used + size <= len(self._chunks[self._index]):
                start = self._used
                self._used += -(-size // ALIGNMENT) * ALIGNMENT
                return start
            self._index += 1
            self._used = 0
        raw = np.empty(max(size, CHUNK_BYTES) + ALIGNMENT, dtype=np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        self._chunks.append(raw[offset : offset + max(size, CHUNK_BYTES)])
        self._used = -(-size // ALIGNMENT) * ALIGNMENT
        return 0
