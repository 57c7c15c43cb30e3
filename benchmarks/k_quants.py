"""Float32 rows to Q4_K, Q5_K and Q6_K, which the gguf package reads but doesn't write.

Scales come from each group's smallest and largest value, without ggml's search for better ones:
enough to hold kernels against what the bytes say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def quantise_k(values: Floats, kind: str) -> Bytes:
    """Rows of a multiple of 256 values as the rows of bytes of a model file."""
    rows, columns = values.shape
    groups = values.reshape(-1, 8, 32)
    blocks = (
        _six_bits(groups) if kind == "Q6_K" else _with_minimums(groups, 5 if "5" in kind else 4)
    )
    return blocks.reshape(rows, columns // 256 * blocks.shape[1])


def _half_bytes(scale: npt.NDArray[Any]) -> Bytes:
    return scale.astype("<f2")[:, None].view(np.uint8)


def _over(values: Floats, scale: Floats) -> Floats:
    """values / scale, 0 where there is no scale."""
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)


def _parts(sizes: Floats) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.uint8]]:
    """[n, 8] of one sign as a float16 a block times six bits each."""
    scale = (sizes.max(axis=1) / 63).astype(np.float16)
    whole = np.rint(_over(sizes, np.broadcast_to(scale[:, None].astype(np.float32), sizes.shape)))
    return scale, np.clip(whole, 0, 63).astype(np.uint8)


def _with_minimums(groups: Floats, bits: int) -> Bytes:
    lowest = np.minimum(groups.min(axis=2), 0)
    scale, scales = _parts((groups.max(axis=2).clip(min=0) - lowest) / (2**bits - 1))
    minimum, minimums = _parts(-lowest)
    step = (scale[:, None].astype(np.float32) * scales)[:, :, None]
    floor = (minimum[:, None].astype(np.float32) * minimums)[:, :, None]
    whole = np.rint(_over(groups + floor, np.broadcast_to(step, groups.shape)))
    quants = np.clip(whole, 0, 2**bits - 1).astype(np.uint8)
    packed = np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minimums[:, :4] | minimums[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    low = quants & 15
    nibbles = (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)
    parts = [_half_bytes(scale), _half_bytes(minimum), packed]
    if bits == 5:
        order = np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(quants >> 4 << order, axis=1))
    return np.concatenate([*parts, nibbles], axis=1)


def _six_bits(groups: Floats) -> Bytes:
    sixteens = groups.reshape(-1, 16, 16)
    largest = np.take_along_axis(sixteens, np.abs(sixteens).argmax(axis=2)[:, :, None], axis=2)[
        :, :, 0
    ]
    wanted = largest / -32
    scale = (np.abs(wanted).max(axis=1) / 127).astype(np.float16)
    by = np.broadcast_to(scale[:, None].astype(np.float32), wanted.shape)
    scales = np.clip(np.rint(_over(wanted, by)), -128, 127).astype(np.int8)
    step = np.broadcast_to((by * scales.astype(np.float32))[:, :, None], sixteens.shape)
    quants = (np.clip(np.rint(_over(sixteens, step.astype(np.float32))), -32, 31) + 32).astype(
        np.uint8
    )
    # [block, part of 128, quarter of 32, place]
    quarters = quants.reshape(-1, 2, 4, 32)
    low = quarters & 15
    nibbles = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    order = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(quarters >> 4 << order, axis=2).reshape(-1, 64)
    return np.concatenate([nibbles, high, scales.view(np.uint8), _half_bytes(scale)], axis=1)
