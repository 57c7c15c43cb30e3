"""The counts behind benchmarks/intensity.py: FLOPs and bytes of each stage of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from octavo.checkpoint import ModelConfig

LINEAR = ("qkv", "o_proj", "gate_up", "down")


@pytest.fixture(scope="module")
def intensity(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("intensity")


def test_counts_of_a_toy_by_hand(intensity: ModuleType, toy: ModelConfig) -> None:
    """R2, R52: a prefill of 3 and a decode at context 5; elements of 2 bytes, sums of 4."""
    work = intensity.stages(toy, [3, 1], [3, 5])
    # 4 rows; 2 layers; per layer [16, 8], [8, 8], [24, 8], [8, 12]; the head [10, 8] on 2 rows.
    assert work["qkv"] == (2 * 2 * 4 * 16 * 8, 2 * (2 * (128 + 32) + 4 * 4 * 16))
    assert work["o_proj"] == (2 * 2 * 4 * 8 * 8, 2 * (2 * (64 + 32) + 4 * 4 * 8))
    # And silu(gate) * up on 4 rows of 12, 5 FLOPs each.
    assert work["gate_up"] == (
        2 * (2 * 4 * 24 * 8 + 5 * 4 * 12),
        2 * (2 * (192 + 32) + 2 * 4 * 12),
    )
    assert work["down"] == (2 * 2 * 4 * 8 * 12, 2 * (2 * (96 + 48) + 4 * 4 * 8))
    assert work["lm_head"] == (2 * 2 * 10 * 8, 2 * (80 + 16) + 4 * 2 * 10)
    # 1 + 2 + 3 keys for the prompt's rows and 5 for the decode: 11 pairs in 4 heads of 2, twice
    # (scores, values). K and V of 3 + 5 tokens: 16 bytes a token; queries 32 and outputs 16 a row.
    assert work["attention"] == (2 * 2 * 2 * 11 * 8, 2 * (16 * 8 + 4 * 48))
    # Norms: 2 a layer on 4 rows of 8, and one on 2 rows. Rotary: 12 elements a row; K, V: 8.
    norms, rotated, stored = 8 * (2 * 2 * 4 + 2), 2 * 4 * 12, 2 * 4 * 8
    assert work["elementwise"] == (
        5 * norms + 3 * rotated,
        14 * norms + 8 * rotated + 6 * stored + 6 * 4 * 8,
    )


def test_a_linear_layer_does_more_per_byte_in_prefill_than_in_decode(intensity: ModuleType) -> None:
    """R52: and in decode, about one FLOP a byte for one request, since each weight is used once."""
    config = intensity.SMOLLM2_135M
    prefill, decode = intensity.stages(config, [512], [512]), intensity.stages(config, [1], [512])
    for name in LINEAR:
        assert decode[name].intensity == pytest.approx(1, rel=0.01)
        assert prefill[name].intensity > 100 * decode[name].intensity


def test_rows_of_other_requests_add_work_but_no_weights(intensity: ModuleType) -> None:
    """R2, R53: 8 decodes are one product: 8 times the FLOPs over nearly the same bytes."""
    config = intensity.SMOLLM2_135M
    one = intensity.stages(config, [1], [256])
    eight = intensity.stages(config, [1] * 8, [256] * 8)
    for name in LINEAR:
        assert eight[name].flops == 8 * one[name].flops
        assert eight[name].bytes < 1.05 * one[name].bytes


def test_decode_attention_reads_every_context_whole(intensity: ModuleType) -> None:
    """R54: bytes of K and V are the sum of contexts; no request shares another's read."""
    config = intensity.SMOLLM2_135M
    a_token = 30 * 2 * 3 * 64 * 2
    assert intensity.kv_bytes(config, [1]) == a_token
    assert intensity.kv_bytes(config, [100, 7, 300]) == 407 * a_token
    by_context = [
        intensity.stages(config, [1] * 8, [n] * 8)["attention"].bytes for n in (256, 512, 768)
    ]
    assert by_context[2] - by_context[1] == by_context[1] - by_context[0] == 8 * 256 * a_token
