"""Stored blocks to float32, exactly as ggml does it.

Each decoder takes blocks [n, block_bytes] uint8 and writes out [n, block_size] float32: quants
first, then the scale (and minimum) of each group by one multiplication (and one addition or
subtraction), in that order, so every value equals llama.cpp's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

CHUNK_ELEMENTS = 1 << 16
"""Elements decoded at a time: 256 KB of output and its temporaries stay in a core's L2 cache."""


def dequantise(raw: Bytes, kind: str, out: Floats) -> None:
    """Decode all of `raw` [num_bytes] into `out` [num_elements], a flat C-order array.

    `kind` is a name of DECODERS. numpy releases the interpreter lock, so tensors may be decoded
    by several threads at once.
    """
    decode, block_size = DECODERS[kind]
    num_blocks = out.size // block_size
    blocks = raw.reshape(num_blocks, -1)
    rows = out.reshape(num_blocks, block_size)
    step = CHUNK_ELEMENTS // block_size
    # A damaged file may hold infinite scales: 0 x inf is NaN then, as in C, and no warning.
    with np.errstate(all="ignore"):
        for start in range(0, num_blocks, step):
            decode(blocks[start : start + step], rows[start : start + step])


def flat(out: Floats, shape: tuple[int, ...]) -> Floats:
    """`out` as one run of elements; it must be what a tensor of this shape is decoded into."""
    assert out.shape == shape, f"a tensor of {shape} was to go into an array of {out.shape}"
    assert out.flags.c_contiguous, "tensors are decoded into contiguous memory"
    return out.reshape(-1)


def _half(blocks: Bytes) -> Floats:
    """Bytes [n, 2] of float16 as a float32 column [n, 1]."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[:] = blocks.view("<u2")
    bits <<= 16


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks[:, :2])


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8.0  # small integers: exact in float32
    out *= _half(blocks[:, :2])


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks[:, :2])
    out += _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 6:], out, high_bits=blocks[:, 2:6])
    out -= 16.0
    out *= _half(blocks[:, :2])


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 8:], out, high_bits=blocks[:, 4:8])
    out *= _half(blocks[:, :2])
    out += _half(blocks[:, 2:4])


def _nibbles(packed: Bytes, out: Floats, *, high_bits: Bytes | None = None) -> None:
    """32 quants from 16 bytes: the low nibbles are elements 0-15, the high ones 16-31.

    high_bits  [n, 4] bytes with bit i the fifth bit of element i
    """
    halves = out.reshape(len(out), 2, 16)
    if high_bits is None:
        halves[:, 0] = packed & 15
        halves[:, 1] = packed >> 4
        return
    fifth = np.unpackbits(high_bits, axis=1, bitorder="little") << 4
    halves[:, 0] = packed & 15 | fifth[:, :16]
    halves[:, 1] = packed >> 4 | fifth[:, 16:]


# K-quants: super-blocks of 256 elements, in 16 groups of 16 or 8 groups of 32, each with a scale of
# few bits that a float16 `d` (and `dmin` for the minimum) multiplies.


def _q2_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    scales = blocks[:, :16]
    packed = blocks[:, 16:80].reshape(n, 2, 32)
    quarters = out.reshape(n, 2, 4, 32)
    for i in range(4):
        quarters[:, :, i] = packed >> 2 * i & 3
    _scale_groups(
        out,
        _half(blocks[:, 80:82]) * (scales & 15),
        _half(blocks[:, 82:84]) * (scales >> 4),
    )


def _q3_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    mask, packed = blocks[:, :32], blocks[:, 32:96].reshape(n, 2, 32)
    quarters = out.reshape(n, 2, 4, 32)
    for half in range(2):
        for i in range(4):
            third_bit = mask >> (4 * half + i) & 1
            quarters[:, half, i] = packed[:, half] >> 2 * i & 3 | third_bit << 2
    out -= 4.0
    # 16 scales of 6 bits: 8 bytes hold low nibbles, 4 bytes four pairs of high bits each.
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = np.empty((n, 16), np.uint8)
    scales[:, :8] = low & 15
    scales[:, 8:] = low >> 4
    for i in range(4):
        scales[:, 4 * i : 4 * i + 4] |= (high >> 2 * i & 3) << 4
    _scale_groups(out, _half(blocks[:, 108:110]) * (scales.astype(np.float32) - 32))


def _q4_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    packed = blocks[:, 16:144].reshape(n, 4, 32)
    pairs = out.reshape(n, 4, 2, 32)
    pairs[:, :, 0] = packed & 15
    pairs[:, :, 1] = packed >> 4
    _scale_groups(out, *_scales_and_minimums(blocks))


def _q5_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    high, packed = blocks[:, 16:48], blocks[:, 48:176].reshape(n, 4, 32)
    pairs = out.reshape(n, 4, 2, 32)
    for i in range(4):
        pairs[:, i, 0] = packed[:, i] & 15 | (high >> 2 * i & 1) << 4
        pairs[:, i, 1] = packed[:, i] >> 4 | (high >> 2 * i + 1 & 1) << 4
    _scale_groups(out, *_scales_and_minimums(blocks))


def _q6_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 2, 32)
    high = blocks[:, 128:192].reshape(n, 2, 32)
    quarters = out.reshape(n, 2, 4, 32)
    for i in range(4):
        nibbles = low[:, :, i % 2] >> 4 * (i // 2) & 15
        quarters[:, :, i] = nibbles | (high >> 2 * i & 3) << 4
    out -= 32.0
    _scale_groups(out, _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8))


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of Q4_K and Q5_K: scales and minimums [n, 8], each 6 bits spread over 12 bytes."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minimums = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minimums


def _scale_groups(out: Floats, scales: Floats, minimums: Floats | None = None) -> None:
    """out = out * scale - minimum, one of each per group: scales, minimums [n, num_groups]."""
    groups = out.reshape(*scales.shape, -1)
    groups *= scales[:, :, None]
    if minimums is not None:
        groups -= minimums[:, :, None]


DECODERS: dict[str, tuple[Callable[[Bytes, Floats], None], int]] = {
    "F32": (_f32, 1),
    "F16": (_f16, 1),
    "BF16": (_bf16, 1),
    "Q8_0": (_q8_0, 32),
    "Q4_0": (_q4_0, 32),
    "Q4_1": (_q4_1, 32),
    "Q5_0": (_q5_0, 32),
    "Q5_1": (_q5_1, 32),
    "Q2_K": (_q2_k, 256),
    "Q3_K": (_q3_k, 256),
    "Q4_K": (_q4_k, 256),
    "Q5_K": (_q5_k, 256),
    "Q6_K": (_q6_k, 256),
}
"""Decoder and block size by type name."""
