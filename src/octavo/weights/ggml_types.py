"""The ggml tensor types that a GGUF file may name: ids, block sizes and bytes per block.

Source: ggml.h and ggml-common.h of llama.cpp. A row is a whole number of blocks.
"""

from __future__ import annotations

from typing import NamedTuple


class GGMLType(NamedTuple):
    """One storage format: `block_size` elements are kept in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


READABLE: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
}
"""Formats that dequantise.py reads, by the id in the file."""

_OTHER_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def type_name(type_id: int) -> str:
    """The field's name for a type id, readable or not, for error texts."""
    if type_id in READABLE:
        return READABLE[type_id].name
    return _OTHER_NAMES.get(type_id, f"unknown type {type_id}")
