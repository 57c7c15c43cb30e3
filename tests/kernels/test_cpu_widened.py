"""Stored weights decoded natively: the very bytes that numpy's decoding and packing give."""

from __future__ import annotations

import numpy as np
import pytest

from beds.backends import cpu_levels
from octavo.checkpoint import StoredRows
from octavo.kernels.api import Array, Linear
from octavo.kernels.cpu import CpuKernels, make_kernels
from octavo.weights.dequantise import DECODERS, dequantise
from octavo.weights.ggml_types import READABLE

KINDS = {info.name: info for info in READABLE.values() if info.name not in ("Q2_K", "Q3_K")}
"""Of those that the weights' room reads, the two left out are decoded by numpy alone."""


def stored(kind: str, n: int, k: int, seed: int = 0, *, finite: bool = False) -> StoredRows:
    """Random bits, among them infinities and NaN where the format has them; or none of these."""
    info = KINDS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, k // info.block_size * info.block_bytes), dtype=np.uint8)
    return StoredRows(kind, blocks & 0xBF if finite else blocks)  # no exponent of all ones


def in_float32(parts: list[StoredRows], k: int) -> Array:
    rows = []
    for part in parts:
        out = np.empty(len(part.rows) * k, np.float32)
        dequantise(part.rows.reshape(-1), part.kind, out)
        rows.append(out.reshape(-1, k))
    return np.concatenate(rows)


def bits(linear: Linear | None, dtype: object = np.uint8) -> bytes:
    """The packed bytes, with one NaN for all NaN: which one it is means nothing."""
    from octavo.kernels.cpu import _native

    values = np.array(_native.packed_bytes(linear)).view(dtype)
    if dtype != np.uint8:
        values[np.isnan(values)] = np.nan
    return values.tobytes()


def test_every_format_that_numpy_reads_is_known_or_left_to_it() -> None:
    for level in cpu_levels()[:1]:
        assert make_kernels(isa=level).stored_kinds == frozenset(KINDS)
        assert set(DECODERS) - {"Q2_K", "Q3_K"} == set(KINDS)


@pytest.mark.parametrize("level", cpu_levels())
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "int8"}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_decoded_weights_are_numpys_to_the_bit(
    level: str, settings: dict[str, str], kind: str
) -> None:
    """Every format, 75 rows (the last panel is not full) of 512 values, and 1 row."""
    kernels = make_kernels(isa=level, **settings)
    form = np.uint8 if "quantization" in settings else kernels.dtype
    for n, k in ((75, 512), (1, 256)):
        parts = [stored(kind, n, k, finite=form == np.uint8)]
        definition = kernels.pack_linear(in_float32(parts, k))
        assert bits(kernels.pack_stored(parts, k), form) == bits(definition, form)


@pytest.mark.parametrize("level", cpu_levels())
def test_parts_of_several_formats_meet_inside_a_panel(level: str) -> None:
    kernels = make_kernels(isa=level)
    parts = [stored(kind, n, 256, n) for kind, n in (("Q4_1", 20), ("F16", 3), ("Q6_K", 50))]
    definition = kernels.pack_linear(in_float32(parts, 256))
    assert bits(kernels.pack_stored(parts, 256), kernels.dtype) == bits(definition, kernels.dtype)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_numbers_may_have_rows_of_any_length_and_lie_at_any_address(kind: str) -> None:
    """Tensors of a safetensors file begin where the one before ends."""
    for level in cpu_levels()[:1]:
        kernels = make_kernels(isa=level)
        plain = stored(kind, 33, 37)
        memory = np.empty(plain.rows.size + 1, np.uint8)
        odd = memory[1:].reshape(plain.rows.shape)
        odd[:] = plain.rows
        made = kernels.pack_stored([StoredRows(kind, odd)], 37)
        definition = kernels.pack_linear(in_float32([plain], 37))
        assert bits(made, kernels.dtype) == bits(definition, kernels.dtype)


def test_rows_of_another_size_are_refused() -> None:
    for level in cpu_levels()[:1]:
        kernels: CpuKernels = make_kernels(isa=level)
        with pytest.raises(ValueError, match="rows of another size"):
            kernels.pack_stored([stored("Q4_1", 8, 64)], 96)
        with pytest.raises(ValueError, match="rows of another size"):
            kernels.pack_stored([stored("Q4_1", 8, 64)], 65)
