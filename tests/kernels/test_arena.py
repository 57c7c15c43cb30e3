"""The bump arena: aligned, disjoint, and of a steady size after one step."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.arena import NumpyArena

shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8)])


@given(requests=st.lists(st.tuples(shapes, dtypes), max_size=30))
def test_arrays_of_a_step_are_aligned_and_share_no_byte(
    requests: list[tuple[tuple[int, ...], np.dtype]],
) -> None:
    arena = NumpyArena(chunk_bytes=1000)  # small: most steps need several chunks
    for _ in range(2):
        arena.reset()
        arrays = [arena.empty(shape, dtype) for shape, dtype in requests]
        for index, array in enumerate(arrays):
            array[...] = index
        for index, (array, (shape, dtype)) in enumerate(zip(arrays, requests, strict=True)):
            assert array.shape == shape
            assert array.dtype == dtype
            assert array.flags.c_contiguous
            assert array.size == 0 or array.ctypes.data % 64 == 0
            assert (array.astype(np.float32) == index).all()


def test_a_step_like_the_last_allocates_nothing() -> None:
    """Chunks are joined by the first reset, and kept from then on."""
    arena = NumpyArena(chunk_bytes=1000)

    def step() -> list[int]:
        arena.reset()
        return [arena.empty((90, 10), np.float32).ctypes.data for _ in range(5)]

    step()
    addresses, nbytes = step(), arena.nbytes
    for _ in range(3):
        assert step() == addresses
    assert arena.nbytes == nbytes


def test_a_small_step_after_a_large_one_keeps_the_memory() -> None:
    arena = NumpyArena(chunk_bytes=1000)
    arena.empty((100_000,), np.uint8)
    nbytes = arena.nbytes
    arena.reset()
    arena.empty((10,), np.uint8)
    assert arena.nbytes == nbytes >= 100_000
