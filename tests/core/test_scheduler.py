"""Scheduler: the four limits, the order of a step, the worked examples of the requirements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.core_bed import CoreBed, alone
from beds.tape_model import TapeRow
from octavo.core.event_log import Reason
from octavo.errors import ConfigError, RequestError, RequestTooLarge
from octavo.messages import NewRequest
from octavo.request import Status
from octavo.sampling_params import SamplingParams


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def distinct(sets: list[set[int]]) -> list[set[int]]:
    """Without repeats in a row."""
    return [now for before, now in zip([None, *sets], sets, strict=False) if now != before]


def test_walk_through_of_continuous_batching() -> None:
    """R18, R19, R20: waiting A..E, batch 3: ABC, BCD, BDE, DE, each join in the very next step."""
    bed = CoreBed(max_num_seqs=3)
    a, b, c, d, e = (bed.add(prompt(3, i), n) for i, n in enumerate((2, 6, 4, 9, 9)))
    bed.run()
    sets = distinct(bed.ran())
    assert sets[:4] == [{a, b, c}, {b, c, d}, {b, d, e}, {d, e}]
    assert bed.ran().index({b, c, d}) == 2, "D joins in the step after the one in which A ended"


def test_chunked_prefill_walk_through() -> None:
    """R5, R109: 1000 tokens in chunks of 256 beside two decodes, which run in each step."""
    bed = CoreBed(num_blocks=400, max_num_batched_tokens=258)
    a, b = bed.add(prompt(4), 50), bed.add(prompt(4, 1), 50)
    bed.step()
    c = bed.add(prompt(1000, 2), 5)
    for _ in range(5):
        bed.step()
    chunks = [
        (trace.first_position[c], trace.first_position[c] + trace.num_new_tokens[c] - 1)
        for trace in bed.model.traces[1:]
    ]
    assert chunks[:4] == [(0, 255), (256, 511), (512, 767), (768, 999)]
    assert all(trace.num_new_tokens[x] == 1 for trace in bed.model.traces[1:] for x in (a, b))
    assert bed.model.traces[5].num_new_tokens == {a: 1, b: 1, c: 1}, "step 5: all three decode"
    assert len(bed.outputs[c]) == 2, "chunks that do not finish the prompt sample nothing (R63)"


def test_whole_prompts_make_long_steps() -> None:
    """R108: without chunks the decodes' step holds the whole prompt; with chunks it is bounded."""
    for chunked, longest in ((False, 1002), (True, 256)):
        budget = 256 if chunked else 2048
        bed = CoreBed(num_blocks=400, enable_chunked_prefill=chunked, max_num_batched_tokens=budget)
        bed.add(prompt(4), 10)
        bed.add(prompt(4, 1), 10)
        bed.step()
        bed.add(prompt(1000, 2), 2)
        bed.run()
        sizes = [sum(trace.num_new_tokens.values()) for trace in bed.model.traces]
        assert max(sizes) == longest


def test_a_whole_prompt_waits_for_a_step_with_room() -> None:
    """Chunks off: it is not cut; nobody overtakes it (R104); too long for any step is refused."""
    bed = CoreBed(enable_chunked_prefill=False, max_num_batched_tokens=10)
    a = bed.add(prompt(8), 3)
    b = bed.add(prompt(9, 1), 3)
    c = bed.add(prompt(1, 2), 3)
    with pytest.raises(RequestTooLarge, match=r"needs 11, the limit is 10"):
        bed.add(prompt(11, 3), 3)
    assert [bed.step().num_scheduled_tokens for _ in range(2)] == [8, 10]
    assert bed.ran() == [{a}, {a, b}]
    assert bed.reasons(b)[:2] == [Reason.TOKEN_BUDGET, Reason.ADMITTED]
    bed.run()
    assert bed.outputs[c] == alone(prompt(1, 2), 3)


def test_a_preempted_request_that_outgrew_every_step_still_resumes() -> None:
    """Chunks off: its prompt fitted a step, prompt and output do not; it is cut, and ends."""
    bed = CoreBed(
        enable_chunked_prefill=False, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    a = bed.add(prompt(8), 20)
    for _ in range(10):
        bed.step()
    assert bed.scheduler.preempt(a)
    bed.run()
    assert bed.outputs[a] == alone(prompt(8), 20)
    assert len(bed.outputs[a]) == 20


def test_four_limits_hold() -> None:
    """R6, R7, R8, R9: each limit binds in turn; CoreBed checks the first two in every step."""
    bed = CoreBed(max_num_seqs=2)
    ids = [bed.add(prompt(3, i), 3) for i in range(4)]
    bed.step()
    assert bed.ran()[0] == set(ids[:2])
    assert bed.reasons(ids[2]) == [Reason.SEQS_FULL]

    bed = CoreBed(max_num_batched_tokens=100, max_num_scheduled_tokens=5)
    bed.add(prompt(12), 2)
    assert [bed.step().num_scheduled_tokens for _ in range(4)] == [5, 5, 2, 1]

    bed = CoreBed(max_model_len=10)
    a = bed.add(prompt(8), 100)
    bed.run()
    assert bed.ends[a].finish_reason == "length"
    assert bed.requests[a].num_tokens == 10

    bed = CoreBed(num_blocks=4)
    a, b = bed.add(prompt(9), 2), bed.add(prompt(5, 1), 2)
    bed.step()
    assert bed.ran()[0] == {a}
    assert bed.reasons(b) == [Reason.NO_BLOCKS]
    bed.run()


def test_the_budget_may_be_smaller_than_the_number_of_sequences() -> None:
    """R7: nobody starves, however small the budget is."""
    bed = CoreBed(max_num_seqs=8, max_num_batched_tokens=3)
    prompts = [prompt(5, i) for i in range(6)]
    ids = [bed.add(p, 4) for p in prompts]
    bed.run()
    assert [bed.outputs[i] for i in ids] == [alone(p, 4) for p in prompts]


def test_running_before_waiting_and_in_order_of_arrival() -> None:
    """R93, R103: decodes take their token first, then the prompt under way, then newcomers."""
    bed = CoreBed(max_num_batched_tokens=6)
    a = bed.add(prompt(6), 10)
    bed.step()
    b, c = bed.add(prompt(7, 1), 5), bed.add(prompt(4, 2), 5)
    bed.step()
    assert bed.model.traces[1].num_new_tokens == {a: 1, b: 5}
    bed.step()
    assert list(bed.model.traces[2].num_new_tokens.items()) == [(a, 1), (b, 2), (c, 3)]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    """R104: if it does not fit, nobody behind it is tried."""
    bed = CoreBed(num_blocks=5)
    bed.add(prompt(8), 6)
    big = bed.add(prompt(16, 1), 2)
    small = bed.add(prompt(1, 2), 2)
    bed.step()
    assert bed.ran() == [{0}]
    assert bed.scheduler.num_waiting == 2
    bed.run()
    first = [min(i for i, ids in enumerate(bed.ran()) if x in ids) for x in (big, small)]
    assert first[0] <= first[1]


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    """C1: it does not sit at the head of the queue for ever; the next one runs."""
    bed = CoreBed(num_blocks=10, block_size=4, max_model_len=100)
    with pytest.raises(RequestTooLarge, match=r"needs 60, the limit is 40") as error:
        bed.add(prompt(60), 1)
    assert (error.value.needed, error.value.available) == (60, 40)
    with pytest.raises(RequestTooLarge, match=r"needs 101, the limit is 100"):
        bed.add(prompt(100), 1)
    small = bed.add(prompt(4), 3)
    bed.run()
    assert bed.outputs[small] == alone(prompt(4), 3)


def test_the_door_lets_in_all_that_fits_and_no_more() -> None:
    """The last token needs no slot: prompt + output - 1 tokens may fill the pool exactly."""
    for num_prompt in (1, 7, 8, 20, 40):
        bed = CoreBed(num_blocks=10, block_size=4, max_model_len=100)
        limit = bed.scheduler.max_output_tokens(num_prompt)
        assert limit == 41 - num_prompt
        with pytest.raises(RequestTooLarge):
            bed.add(prompt(num_prompt), limit + 1)
        bed.add(prompt(num_prompt), limit)
        bed.run()
        assert len(bed.outputs[0]) == limit
        assert bed.scheduler.stats().num_preemptions == 0
    assert CoreBed(max_model_len=30).scheduler.max_output_tokens(30) == 0


def test_nonsense_is_refused() -> None:
    """C53: an empty prompt, or nothing to generate, is the caller's error."""
    bed = CoreBed()
    with pytest.raises(RequestError, match="prompt is empty"):
        bed.add([], 1)
    with pytest.raises(RequestError, match="max_tokens"):
        bed.add([1], 0)
    assert not bed.scheduler.has_unfinished()
    assert bed.step().scheduled == ()


@pytest.mark.parametrize(
    "setting", ["scheduling_policy", "victim_policy", "preemption_mode", "batching_mode"]
)
def test_unknown_policies_are_refused_by_name(setting: str) -> None:
    """The error names the setting and what it could be."""
    with pytest.raises(ConfigError, match=rf"{setting} is 'astrology', but must be one of \w+"):
        CoreBed(**{setting: "astrology"})


def test_half_admitted_requests_do_not_hold_each_other_up() -> None:
    """C2: two prompts of 6 blocks, 8 blocks, chunks of one block: the second waits for the first.

    CoreBed fails after three steps in a row without work.
    """
    bed = CoreBed(num_blocks=8, max_num_batched_tokens=4)
    ids = [bed.add(prompt(24, i), 3) for i in range(2)]
    bed.run()
    assert [bed.outputs[i] for i in ids] == [alone(prompt(24, i), 3) for i in range(2)]
    assert bed.scheduler.stats().num_preemptions == 0
    assert not any(ran == set(ids) for ran in bed.ran()[:5])


def test_freed_blocks_serve_the_next_request_at_once() -> None:
    """R31: D takes the blocks that A left, in whatever order, in the step after A ended."""
    bed = CoreBed(num_blocks=6, enable_prefix_caching=False)
    a = bed.add(prompt(8), 1)
    b = bed.add(prompt(7, 1), 6)
    held: list[int] = []
    bed.step(lambda: held.extend(bed.requests[a].block_ids))
    d = bed.add(prompt(16, 2), 2)
    bed.step()
    assert bed.ran()[1] == {b, d}
    assert held == [0, 1]
    assert bed.requests[d].block_ids == [0, 1, 4, 5]
    bed.run()


@given(order=st.permutations(range(5)), num_ended=st.integers(1, 5))
def test_blocks_freed_in_any_order_serve_the_next_request_at_once(
    order: list[int], num_ended: int
) -> None:
    """R31: whoever ends, and in whichever order, all that they held is one request's next step."""
    bed = CoreBed(num_blocks=10, enable_prefix_caching=False)
    ids = [bed.add(prompt(7, i), 8) for i in range(5)]
    bed.step()
    freed = [block_id for i in order[:num_ended] for block_id in bed.requests[ids[i]].block_ids]
    assert len(freed) == 2 * num_ended
    for i in order[:num_ended]:
        bed.scheduler.finish(ids[i], "abort")
    new = bed.add(prompt(4 * len(freed), 9), 1)
    plan = bed.scheduler.schedule()
    (start,) = plan.starts
    assert start.request_id == new
    (entry,) = [entry for entry in plan.scheduled if entry.row == start.row]
    assert sorted(entry.new_block_ids) == sorted(freed)
    assert len(plan.scheduled) == 6 - num_ended, "and nobody yielded to it"


def test_blocks_are_taken_on_demand() -> None:
    """R29: never more than one block that is not full, never for what max_tokens might bring."""
    bed = CoreBed(num_blocks=200)
    a = bed.add(prompt(6), 300)
    for _ in range(40):
        bed.step()
        request = bed.requests[a]
        assert len(request.block_ids) * 4 - request.num_computed_tokens < 4


def test_slot_of_a_position() -> None:
    """R26, R27: block_size 16, table [5, 8, 12], position 25 is in slot 137."""
    bed = CoreBed(num_blocks=16, block_size=16)
    row = TapeRow(NewRequest(0, 0, (1,), 1, SamplingParams(), 0, ()))
    row.block_table = [5, 8, 12]
    slot = bed.model.slot_of(row, 25)
    assert slot == 137
    assert divmod(slot, 16) == (8, 9)


def test_only_low_blocks_are_touched() -> None:
    """A large pool costs no memory that the requests do not need."""
    bed = CoreBed(num_blocks=100, enable_prefix_caching=False)
    for i in range(50):
        bed.add(prompt(7, i), 3)
        bed.run()
    assert bed.model.max_block_id <= 2


def test_life_cycle() -> None:
    """R92: waiting -> running -> finished, and running -> preempted -> running."""
    bed = CoreBed()
    a = bed.add(prompt(3), 5)
    request = bed.requests[a]
    seen = [request.status]
    bed.step()
    seen.append(request.status)
    bed.scheduler.preempt(a)
    seen.append(request.status)
    bed.step()
    seen.append(request.status)
    bed.run()
    seen.append(request.status)
    assert seen == [
        Status.WAITING,
        Status.RUNNING,
        Status.PREEMPTED,
        Status.RUNNING,
        Status.FINISHED,
    ]
    assert bed.reasons(a) == [Reason.ADMITTED, Reason.PREEMPTED, Reason.RESUMED, Reason.FINISHED]


def test_a_waiting_reason_is_logged_once() -> None:
    """The log is bounded: a queue that stands still must not push out what matters."""
    bed = CoreBed(max_num_seqs=1)
    bed.add(prompt(3), 30)
    b = bed.add(prompt(3, 1), 2)
    for _ in range(25):
        bed.step()
    assert bed.reasons(b) == [Reason.SEQS_FULL]


def test_a_budget_that_never_reaches_everybody_is_logged_once() -> None:
    """Nor may decodes that wait behind others in every step; a new one to wait is news."""
    bed = CoreBed(max_num_seqs=4, max_num_batched_tokens=4)
    for i in range(4):
        bed.add(prompt(1, i), 60)
    bed.step()
    bed.scheduler.config = replace(bed.scheduler.config, max_num_batched_tokens=2)
    for _ in range(50):
        bed.step()
    (event,) = bed.events(Reason.TOKEN_BUDGET)
    assert (event.request_id, event.detail) == (2, (1, 0))
    bed.run()
    assert [bed.outputs[i] for i in range(4)] == [alone(prompt(1, i), 60) for i in range(4)]
