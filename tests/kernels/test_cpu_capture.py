"""Captured steps and a pruned last layer: quicker ways that change no bit.

Each names the slow way that it must equal: the model's own Python, computing every row.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.cpu_kernels import CASES, IDS, bits, kernels
from beds.steps import Part, naive_batch
from beds.tiny_llama import VARIANTS, make_checkpoint
from octavo.kernels.api import Forward, HeadOutput, KVCache
from octavo.kernels.arena import NumpyArena
from octavo.kernels.cpu.capture import CapturedForward
from octavo.models.batch import ForwardBatch, trace_batches
from octavo.models.registry import Model, build_model

cases = pytest.mark.parametrize("case", CASES, ids=IDS)
NUM_BLOCKS, BLOCK_SIZE = 24, 16


backend = cache(kernels)  # a model is captured through the op table that it computes with


@cache
def model_of(case: tuple[str, str], variant: str, prune: bool) -> Model:
    checkpoint = make_checkpoint(variant)
    return build_model(checkpoint, backend(case), max_model_len=128, prune_last_layer=prune)


def pool(case: tuple[str, str], variant: str) -> KVCache:
    config = VARIANTS[variant]
    cache = backend(case).allocate_kv_cache(
        num_layers=config.num_hidden_layers,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    for block in range(NUM_BLOCKS):
        cache.fill_block(block, float("nan"))
    return cache


def captured(case: tuple[str, str], model: Model, cache: KVCache) -> CapturedForward:
    forward = backend(case).capture(model.forward, cache, trace_batches())
    assert isinstance(forward, CapturedForward), "the model could not be captured"
    assert set(forward.programs) == {False, True}
    return forward


def last_rows(batch: ForwardBatch, samples: list[bool]) -> ForwardBatch:
    """`batch`, sampling the last row of the requests that `samples` says."""
    indices = (batch.query_start_loc[1:] - 1)[np.array(samples, bool)].astype(np.int32)
    return batch._replace(
        logits_indices=indices,
        argmax_only=np.zeros(len(indices), np.int32),
        sampled_positions=batch.positions[indices],
        sampled_start_loc=np.concatenate(([0], np.cumsum(samples))).astype(np.int32),
    )


def some_argmax(draw: st.DrawFn, batch: ForwardBatch) -> ForwardBatch:
    """`batch`, of some of whose sampled rows only the argmax is wanted."""
    size = len(batch.logits_indices)
    only = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return batch._replace(argmax_only=np.array(only, np.int32))


@st.composite
def steps(draw: st.DrawFn, vocab_size: int) -> list[ForwardBatch]:
    """Two steps over the same 1 to 5 requests: prompts in chunks, then more of each."""
    number = draw(st.integers(1, 5))
    ids = [
        draw(st.lists(st.integers(0, vocab_size - 1), min_size=2, max_size=60))
        for _ in range(number)
    ]
    cuts = [draw(st.integers(1, len(each) - 1)) for each in ids]
    blocks = [list(range(4 * i, 4 * i + 4)) for i in range(number)]
    both = []
    for first in (True, False):
        parts = [
            Part(each, 0 if first else cut, cut if first else len(each) - cut, block, [])
            for each, cut, block in zip(ids, cuts, blocks, strict=True)
        ]
        samples = draw(st.lists(st.booleans(), min_size=number, max_size=number))
        both.append(some_argmax(draw, last_rows(naive_batch(parts, BLOCK_SIZE), samples)))
    return both


def run(forward: Forward, batches: list[ForwardBatch], cache: KVCache) -> list[bytes]:
    """Logits and best tokens of each step, and all K and V after the last; scratch memory is NaN
    before each, and stays so where logits would lie that nobody asked for."""
    arena = NumpyArena()
    arena.empty((1 << 20,), np.uint8)
    results = []
    for batch in batches:
        arena.reset()
        arena.empty((1 << 20,), np.uint8).fill(0xFF)  # a NaN in either type
        arena.reset()
        logits, best = forward(batch, cache, arena)
        only = batch.argmax_only == 1
        assert len(logits) == len(best) == len(batch.logits_indices)
        assert (np.isnan(logits).any(axis=1) == only).all()
        assert (np.isnan(logits).all(axis=1) == only).all()
        assert ((best >= 0) == only).all()
        results += [bits(logits), bits(best)]
    used = sorted({int(slot) // BLOCK_SIZE for batch in batches for slot in batch.slot_mapping})
    for layer in range(cache.num_layers):
        results += [bits(x) for block in used for x in cache.read_block(layer, block)]
    return results


@cases
@settings(max_examples=10)
@given(data=st.data())
def test_captured_and_pruned_is_the_plain_model(case: tuple[str, str], data: st.DataObject) -> None:
    """R64, R65: replayed, with the last layer for sampled rows only or for all: the same logits
    and the same K and V, whatever the requests, their chunks, and which of them sample."""
    variant = data.draw(st.sampled_from(["tied", "untied", "odd_sizes"]))
    batches = data.draw(steps(VARIANTS[variant].vocab_size))
    plain = run(model_of(case, variant, False).forward, batches, pool(case, variant))
    for prune in (False, True):
        model, cache = model_of(case, variant, prune), pool(case, variant)
        assert run(model.forward, batches, pool(case, variant)) == plain
        forward = captured(case, model, cache)
        for block in range(NUM_BLOCKS):
            cache.fill_block(block, float("nan"))
        assert run(forward, batches, cache) == plain


def test_a_step_is_one_list_of_calls() -> None:
    """Every op is in the list, and once for all requests: three layers and the head; of the last
    layer, sampled rows have their queries, attention and MLP apart (R49, R53, R57, R64, R65)."""
    case = CASES[0]
    model, cache = model_of(case, "odd_sizes", True), pool(case, "odd_sizes")
    forward = captured(case, model, cache)
    layer = 2 + 4 + 1 + 1 + 1  # norms, products, rotary, cache, attention
    last = layer + 1 + 1 + 2  # queries apart: one more product and rotary; two gathers
    assert len(forward.programs[True].program) == 1 + 2 * layer + last + 2
    assert len(forward.programs[False].program) == 1 + 2 * layer + 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"input_ids": np.array([3, 999], np.int32)}, IndexError),
        ({"positions": np.array([0, 128], np.int32)}, IndexError),
        ({"slot_mapping": np.array([0, NUM_BLOCKS * BLOCK_SIZE], np.int32)}, IndexError),
        ({"slot_mapping": np.array([0], np.int32)}, ValueError),
        ({"logits_indices": np.array([2], np.int32)}, IndexError),
        ({"argmax_only": np.array([2], np.int32)}, IndexError),
        ({"argmax_only": np.array([0, 0], np.int32)}, ValueError),
        ({"block_table": np.array([[-1]], np.int32)}, IndexError),
        ({"seq_lens": np.array([1], np.int32)}, ValueError),
        ({"query_start_loc": np.array([0, 1], np.int32)}, ValueError),
        ({"sampled_start_loc": np.array([0, 2], np.int32)}, ValueError),
    ],
)
def test_a_replay_checks_what_it_is_given(change: dict[str, np.ndarray], error: type) -> None:
    """Index arrays that don't fit are refused before anything is computed, as by the ops."""
    case = CASES[0]
    model, cache = model_of(case, "tied", True), pool(case, "tied")
    forward = captured(case, model, cache)
    good = last_rows(naive_batch([Part([3, 4], 0, 2, [0], [])], BLOCK_SIZE), [True])
    assert forward(good, cache, NumpyArena()).logits.shape == (1, 96)
    with pytest.raises(error):
        forward(good._replace(**change), cache, NumpyArena())


def test_what_can_not_be_a_list_is_computed_by_the_model() -> None:
    """A model that computes an array in Python is refused by the recorder, never half captured."""
    case = CASES[0]
    model, cache = model_of(case, "tied", True), pool(case, "tied")
    ops = backend(case)

    def forward(batch: ForwardBatch, kv_cache: KVCache, arena: NumpyArena) -> HeadOutput:
        return model.forward(batch._replace(positions=batch.positions + 1), kv_cache, arena)

    assert ops.capture(forward, cache, trace_batches()) is None
    other = kernels(case)  # not what the model computes with: nothing to record
    assert other.capture(model.forward, cache, trace_batches()) is None
