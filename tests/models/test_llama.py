"""The Llama model against the papers' definitions, by way of the paged cache."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from beds.backends import TEST_BACKENDS, kernels_of, logit_tolerance
from beds.dense_llama import dense_logits
from beds.steps import Drive, Part, Sequence, naive_batch
from beds.tiny_llama import VARIANTS, make_checkpoint, make_tensors
from octavo.models.registry import Model, build_model

pytestmark = pytest.mark.parametrize("backend", TEST_BACKENDS)


@cache
def model_of(backend: str, variant: str) -> Model:
    return build_model(make_checkpoint(variant), kernels_of(backend), max_model_len=256)


def tokens(count: int, variant: str = "tied", seed: int = 1) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VARIANTS[variant].vocab_size, count).tolist()


def expected(variant: str, token_ids: list[int]) -> np.ndarray:
    return dense_logits(VARIANTS[variant], make_tensors(VARIANTS[variant]), token_ids)


def assert_close(logits: np.ndarray | None, wanted: np.ndarray, backend: str) -> None:
    assert logits is not None
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=logit_tolerance(kernels_of(backend)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_equals_the_dense_definition(backend: str, variant: str) -> None:
    """R36-R38, R43, R48, R55-R59, R66: every stage of the model, for each rope and each shape."""
    drive = Drive(model_of(backend, variant), kernels_of(backend))
    seq = Sequence(tokens(75, variant), [7, 2, 9, 0, 30])
    drive.step([(seq, 75)])
    assert_close(seq.logits, expected(variant, seq.token_ids), backend)


@pytest.mark.parametrize("variant", ["tied", "llama3_rope", "odd_sizes"])
def test_decode_equals_the_dense_definition(backend: str, variant: str) -> None:
    """R51: one query a step over all history."""
    drive = Drive(model_of(backend, variant), kernels_of(backend), block_size=4)
    seq = Sequence(tokens(21, variant), [3, 1, 4, 15, 9, 2])
    for _ in range(21):
        drive.step([(seq, 1)])
    assert_close(seq.logits, expected(variant, seq.token_ids), backend)


def test_mixed_prefill_chunks_and_decode_in_one_step(backend: str) -> None:
    """R49, R53: one varlen call serves a whole prompt, a chunk and decode rows together."""
    drive = Drive(model_of(backend, "tied"), kernels_of(backend))
    decoding = Sequence(tokens(40, seed=2), [5, 8, 12])
    chunked = Sequence(tokens(50, seed=3), [1, 2, 3, 4])
    whole = Sequence(tokens(33, seed=4), [20, 21, 22])
    drive.step([(decoding, 38)])
    drive.step([(chunked, 20), (decoding, 1)])
    drive.step([(decoding, 1), (whole, 33), (chunked, 30)])
    for seq in (decoding, chunked, whole):
        assert_close(seq.logits, expected("tied", seq.token_ids), backend)


def test_a_shared_prefix_is_read_through_both_block_tables(backend: str) -> None:
    """R45, R50: a prefix hit computes its new tokens over blocks that another request wrote."""
    drive = Drive(model_of(backend, "tied"), kernels_of(backend))
    first = Sequence(tokens(40, seed=5), [5, 8, 12])
    drive.step([(first, 40)])
    second = Sequence(first.token_ids[:32] + tokens(10, seed=6), [5, 8, 3], num_computed=32)
    drive.step([(second, 10)])
    assert_close(second.logits, expected("tied", second.token_ids)[32:], backend)


def test_only_sampled_rows_reach_the_lm_head(backend: str) -> None:
    """R61: logits are [S, V] of the rows asked for, not of all T; R62: any rows may be asked."""
    model, kernels = model_of(backend, "tied"), kernels_of(backend)
    drive = Drive(model, kernels)
    one, two = tokens(30, seed=7), tokens(20, seed=8)
    parts = [Part(one, 0, 30, [0, 1], [29]), Part(two, 0, 20, [2, 3], [3, 11, 19])]
    logits = model.forward(naive_batch(parts, 16), drive.kv_cache, drive.arena).logits
    assert logits.shape == (4, 96)
    assert logits.dtype == np.float32
    wanted = np.concatenate([expected("tied", one)[[29]], expected("tied", two)[[3, 11, 19]]])
    assert_close(logits, wanted, backend)


def test_an_unfinished_chunk_has_no_logits_but_leaves_its_keys(backend: str) -> None:
    """R63: nothing is sampled in the middle of a prompt."""
    model, kernels = model_of(backend, "tied"), kernels_of(backend)
    drive = Drive(model, kernels)
    token_ids = tokens(25, seed=9)
    chunk = naive_batch([Part(token_ids, 0, 16, [4, 6], [])], 16)
    assert model.forward(chunk, drive.kv_cache, drive.arena).logits.shape == (0, 96)
    rest = Sequence(token_ids, [4, 6], num_computed=16)
    drive.step([(rest, 9)])
    assert_close(rest.logits, expected("tied", token_ids)[16:], backend)


def test_keys_and_values_lie_in_the_slots_of_the_mapping(backend: str) -> None:
    """R22-R27: position 25 with table [5, 8, 12] lands in slot 137, in every layer."""
    drive = Drive(model_of(backend, "tied"), kernels_of(backend))
    seq = Sequence(tokens(26), [5, 8, 12])
    assert naive_batch([seq.part(26)], 16).slot_mapping[25] == 137
    drive.step([(seq, 25)])
    before = [drive.kv_cache.read_block(layer, 8) for layer in range(2)]
    drive.step([(seq, 1)])
    for layer in range(2):
        for old, new in zip(before[layer], drive.kv_cache.read_block(layer, 8), strict=True):
            assert new.shape == (16, 2, 16)
            assert np.isfinite(new[:10]).all()  # positions 16 to 25
            assert np.isnan(new[10:]).all()  # not written yet
            changed = ~((old == new) | (np.isnan(old) & np.isnan(new)))
            assert changed.any(axis=(1, 2)).nonzero()[0].tolist() == [137 % 16]
    untouched = np.concatenate(drive.kv_cache.read_block(0, 12))
    assert np.isnan(untouched).all()


def test_fresh_keys_are_read_back_from_the_cache(backend: str) -> None:
    """R48: what attention sees in a prefill is what the cache holds: same bits as a later hit."""
    model, kernels = model_of(backend, "tied"), kernels_of(backend)
    token_ids = tokens(20)
    drive = Drive(model, kernels)
    fresh = Sequence(token_ids, [0, 1])
    drive.step([(fresh, 20)])
    again = Sequence(token_ids, [0, 1], num_computed=19)
    drive.step([(again, 1)])
    assert fresh.logits is not None
    np.testing.assert_array_equal(fresh.logits[19:], again.logits)


def test_changing_one_request_never_changes_another(backend: str) -> None:
    """R44: requests are isolated by query_start_loc, whatever stands beside them (NaN too)."""
    model, kernels = model_of(backend, "tied"), kernels_of(backend)
    results = []
    for neighbour_seed in (10, 11):
        drive = Drive(model, kernels)
        if neighbour_seed == 11:  # a neighbour whose keys are not numbers
            broken = Sequence(tokens(5, seed=12) * 4, [9, 10], num_computed=16)
        else:
            broken = Sequence(tokens(30, seed=neighbour_seed), [9, 10])
        mine = Sequence(tokens(30, seed=13), [3, 4])
        drive.step([(broken, 4), (mine, 30)])
        results.append((mine.logits, broken.logits))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert np.isfinite(results[0][1]).all()
    assert np.isnan(results[1][1]).all()  # a row of NaN stays one: the sampler faults it (C37)
