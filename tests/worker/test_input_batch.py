"""A plan's flat arrays: by hand, and against a builder that goes token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.steps import Part, naive_batch
from octavo.messages import NewRequest, ScheduledRequest, SchedulerOutput
from octavo.models.batch import ForwardBatch
from octavo.sampling_params import SamplingParams
from octavo.worker.input_batch import InputBatch


def new_request(row: int, token_ids: list[int]) -> NewRequest:
    return NewRequest(row, row, tuple(token_ids), len(token_ids), SamplingParams(), 0, ())


def plan_of(*scheduled: ScheduledRequest) -> SchedulerOutput:
    return SchedulerOutput(0, (), scheduled, sum(s.num_new_tokens for s in scheduled))


def assert_arrays(batch: ForwardBatch, **wanted: list[object]) -> None:
    for name, values in wanted.items():
        np.testing.assert_array_equal(getattr(batch, name), values, err_msg=name)


def test_the_worked_example() -> None:
    """R10, R23-R28: tables [5, 8, 12] and [3, 7]; position 25 of the first writes slot 137."""
    rows = InputBatch(max_num_seqs=4, max_model_len=48, block_size=16)
    rows.start(new_request(2, list(range(100, 126))))
    rows.start(new_request(0, list(range(200, 220))))
    rows.build(plan_of(ScheduledRequest(2, 0, 24, False, (5, 8))))
    batch = rows.build(
        plan_of(
            ScheduledRequest(2, 24, 2, True, (12,)),
            ScheduledRequest(0, 0, 3, False, (3, 7)),
        )
    )
    assert_arrays(
        batch,
        input_ids=[124, 125, 200, 201, 202],
        positions=[24, 25, 0, 1, 2],
        slot_mapping=[136, 137, 48, 49, 50],
        query_start_loc=[0, 2, 5],
        seq_lens=[26, 3],
        block_table=[[5, 8, 12], [3, 7, -1]],
        logits_indices=[1],
    )


def test_a_sampled_token_is_computed_next() -> None:
    rows = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    rows.start(new_request(0, [7, 8, 9]))
    assert_arrays(rows.build(plan_of(ScheduledRequest(0, 0, 3, True, (1,)))), logits_indices=[2])
    rows.append(0, 42)
    batch = rows.build(plan_of(ScheduledRequest(0, 3, 1, True)))
    assert_arrays(batch, input_ids=[42], positions=[3], slot_mapping=[7], block_table=[[1]])


def test_a_row_taken_over_keeps_nothing_of_its_last_owner() -> None:
    """A resumed request brings its tokens and all its blocks; the old table is gone."""
    rows = InputBatch(max_num_seqs=2, max_model_len=32, block_size=4)
    rows.start(new_request(1, list(range(20))))
    rows.build(plan_of(ScheduledRequest(1, 0, 20, True, (9, 8, 7, 6, 5))))
    rows.start(new_request(1, [70, 71]))
    batch = rows.build(plan_of(ScheduledRequest(1, 0, 2, True, (4,))))
    assert_arrays(batch, input_ids=[70, 71], block_table=[[4]], seq_lens=[2])
    assert (rows.block_table[1, 1:] == -1).all()


@pytest.mark.parametrize(
    ("scheduled", "text"),
    [
        (ScheduledRequest(0, 0, 5, True, (1, 2)), "token is not known"),
        (ScheduledRequest(0, 0, 4, False, (1,)), "exactly the rows"),
        (ScheduledRequest(0, 0, 3, True, (1,)), "exactly the rows"),
    ],
)
def test_a_plan_that_disagrees_with_the_rows_is_our_own_bug(
    scheduled: ScheduledRequest, text: str
) -> None:
    """R63 and the message's own promises are checked on both sides of the line."""
    rows = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4)
    rows.start(new_request(0, [1, 2, 3, 4]))
    with pytest.raises(AssertionError, match=text):
        rows.build(plan_of(scheduled))


def test_a_token_without_a_block_is_our_own_bug() -> None:
    rows = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4)
    rows.start(new_request(0, [1, 2, 3, 4, 5]))
    with pytest.raises(AssertionError, match="without a block"):
        rows.build(plan_of(ScheduledRequest(0, 0, 5, True, (1,))))


@settings(max_examples=60)
@given(data=st.data())
def test_arrays_equal_those_of_a_builder_that_goes_token_by_token(data: st.DataObject) -> None:
    """Requests come, compute chunks, sample, leave and are replaced; every step is compared."""
    block_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    rows = InputBatch(max_num_seqs=4, max_model_len=40, block_size=block_size)
    live: dict[int, tuple[list[int], list[int], int]] = {}  # row -> tokens, blocks, num_computed
    next_block = 0
    for _ in range(data.draw(st.integers(1, 8))):
        for row in data.draw(st.sets(st.integers(0, 3), min_size=1)):
            if row not in live or data.draw(st.booleans()):
                prompt = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=30))
                rows.start(new_request(row, prompt))
                live[row] = (prompt, [], 0)
        chosen = data.draw(st.permutations(sorted(live)))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        scheduled, parts = [], []
        for row in chosen:
            token_ids, block_ids, computed = live[row]
            num_new = data.draw(st.integers(1, len(token_ids) - computed))
            end = computed + num_new
            needed = -(-end // block_size) - len(block_ids)
            new_ids = tuple(range(next_block, next_block + needed))
            next_block += needed
            block_ids = [*block_ids, *new_ids]
            samples = end == len(token_ids)
            wanted = [end - 1] if samples else []
            scheduled.append(ScheduledRequest(row, computed, num_new, samples, new_ids))
            parts.append(Part(token_ids, computed, num_new, block_ids, wanted))
            live[row] = (token_ids, block_ids, end)
        batch = rows.build(plan_of(*scheduled))
        for name, array, naive in zip(
            ForwardBatch._fields[:-1], batch, naive_batch(parts, block_size), strict=False
        ):
            np.testing.assert_array_equal(array, naive, err_msg=name)
            assert array.dtype == np.int32, name
            assert array.flags.c_contiguous, name
        for s in scheduled:
            token_ids, block_ids, computed = live[s.row]
            if s.samples and len(token_ids) < 40:
                rows.append(s.row, 1000 + len(token_ids))
                live[s.row] = ([*token_ids, 1000 + len(token_ids)], block_ids, computed)
            elif s.samples:
                del live[s.row]
