"""Every stored format against the gguf package's own decoder, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.weights.dequantise import CHUNK_ELEMENTS, DECODERS, dequantise
from octavo.weights.ggml_types import READABLE, type_name

KINDS = {kind.name: kind for kind in READABLE.values()}


def decoded(raw: np.ndarray, kind: str) -> np.ndarray:
    out = np.full(len(raw) * KINDS[kind].block_size, 7, np.float32)
    dequantise(raw.reshape(-1), kind, out)
    return out


def by_gguf(raw: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):  # random scales may be infinite
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return values.reshape(-1)


def random_blocks(kind: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    shape = (num_blocks, KINDS[kind].block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_format_decodes_bit_for_bit_like_gguf(kind: str) -> None:
    """Random bytes, so every scale, minimum and high bit is exercised; past a chunk's border."""
    raw = random_blocks(kind, CHUNK_ELEMENTS // KINDS[kind].block_size + 37)
    ours, theirs = decoded(raw, kind), by_gguf(raw, kind)
    both_nan = np.isnan(ours) & np.isnan(theirs)
    assert np.array_equal(ours.view(np.uint32)[~both_nan], theirs.view(np.uint32)[~both_nan])
    assert both_nan.mean() < 0.3


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_single_block_decodes_like_the_same_block_among_many(kind: str) -> None:
    raw = random_blocks(kind, 5, seed=1)
    whole = decoded(raw, kind).reshape(5, -1)
    for i in range(5):
        assert decoded(raw[i : i + 1], kind).tobytes() == whole[i].tobytes()


def test_decoders_and_type_table_name_the_same_formats() -> None:
    sizes = {kind.name: kind.block_size for kind in READABLE.values()}
    assert {kind: size for kind, (_, size) in DECODERS.items()} == sizes


def test_type_table_equals_that_of_gguf() -> None:
    for type_id, kind in READABLE.items():
        theirs = gguf.GGMLQuantizationType(type_id)
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_size, kind.block_bytes)


def test_types_that_are_not_read_have_a_name_too() -> None:
    assert type_name(23) == "IQ4_XS"
    assert type_name(12) == "Q4_K"
    assert type_name(999) == "unknown type 999"
