"""Scratch memory of one step: a bump allocator over numpy buffers, for backends on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .api import Array

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""

CHUNK_BYTES = 1 << 20


class NumpyArena:
    """Bump allocation over 64-byte-aligned chunks; fills the Arena protocol of kernels/api.py.

    A step that needs more than the last one takes a further chunk; the next reset() joins them
    into one, so that steps of a steady size allocate nothing. Pages become resident when written.
    """

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        allocate: Callable[[int], Array] = lambda nbytes: np.empty(nbytes, np.uint8),
    ) -> None:
        """allocate: uninitialised uint8 [nbytes]."""
        self._chunk_bytes = chunk_bytes
        self._allocate = allocate
        self._chunks: list[Array] = []
        self._offset = 0
        """Bytes used of the last chunk."""

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised array, aligned to 64 bytes, valid until reset()."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if not self._chunks or self._offset + size > self._chunks[-1].nbytes:
            self._chunks.append(self._aligned(max(size, self._chunk_bytes)))
            self._offset = 0
        memory = self._chunks[-1][self._offset : self._offset + size]
        self._offset += -(-size // ALIGNMENT) * ALIGNMENT
        array: Array = memory.view(dtype).reshape(shape)
        return array

    def reset(self) -> None:
        """Start over; memory is kept for the next step. Arrays given out before are void."""
        if len(self._chunks) > 1:
            total = self.nbytes
            self._chunks.clear()  # the old chunks go before the new one comes
            self._chunks.append(self._aligned(total))
        self._offset = 0

    def _aligned(self, size: int) -> Array:
        """Uninitialised uint8 [>= size], its first byte and its length multiples of ALIGNMENT."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        memory = self._allocate(size + ALIGNMENT)
        start = -memory.ctypes.data % ALIGNMENT
        aligned: Array = memory[start : start + size]
        return aligned
