"""Weights in the formats of model files, of random bits."""

from __future__ import annotations

import numpy as np

from octavo.checkpoint import StoredRows
from octavo.weights.ggml_types import READABLE

KINDS = {info.name: info for info in READABLE.values() if info.name[:2] in ("Q8", "Q4", "Q5", "Q6")}
SCALES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
"""Where a block's float16 scales lie; the others have two, at its start."""


def random_rows(kind: str, n: int, k: int, seed: int) -> StoredRows:
    """Any bits as quants, with scales of ordinary size."""
    rng = np.random.default_rng(seed)
    info = KINDS[kind]
    blocks = rng.integers(0, 256, (n * k // info.block_size, info.block_bytes), dtype=np.uint8)
    for at in SCALES.get(kind, (0, 2)):
        scales = rng.uniform(-0.02, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return StoredRows(kind, blocks.reshape(n, -1))
