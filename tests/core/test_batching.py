"""Static batching and contiguous K/V: baselines that run in the same scheduler, to be measured."""

from __future__ import annotations

import random

import pytest

from beds.core_bed import CoreBed, alone
from octavo.core.event_log import Reason
from octavo.errors import ConfigError, RequestTooLarge
from octavo.messages import SampledToken, SchedulerOutput, StepResult


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def utilisation(bed: CoreBed, max_num_seqs: int) -> float:
    """Tokens sampled in a share of the slots that the steps had."""
    return sum(map(len, bed.outputs.values())) / (len(bed.model.traces) * max_num_seqs)


STATIC = pytest.mark.parametrize("mode", ["static", "static_dropped"])


@STATIC
def test_a_static_batch_lasts_as_long_as_its_longest_request(mode: str) -> None:
    """R12, R13: 50, 2000 and 100 output tokens: 2000 steps, 2150 of 6000 slots used: 35.8 %."""
    bed = CoreBed(num_blocks=1000, max_num_seqs=3, batching_mode=mode)
    for i, num_output in enumerate((50, 2000, 100)):
        bed.add(prompt(3, i), num_output)
    bed.run()
    assert len(bed.model.traces) == 2000
    assert round(utilisation(bed, 3), 3) == 0.358


def test_padding_costs_a_row_and_its_compute_and_dropped_rows_do_not() -> None:
    """R12, R16: the same steps; in one the finished rows are computed to the end, unseen."""
    num_computed = {}
    for mode in ("static", "static_dropped", "continuous"):
        bed = CoreBed(num_blocks=100, max_num_seqs=3, batching_mode=mode)
        for i, num_output in enumerate((5, 40, 10)):
            bed.add(prompt(3, i), num_output)
        bed.run()
        num_computed[mode] = bed.num_computed()
        assert [len(bed.outputs[i]) for i in range(3)] == [5, 40, 10]
        assert bed.scheduler.kv.num_available == 100
    assert num_computed["static_dropped"] == num_computed["continuous"]
    assert num_computed["static"] == num_computed["continuous"] + 35 + 30


@STATIC
def test_nobody_joins_a_static_batch_that_runs(mode: str) -> None:
    """R12, R16: short ones wait for long ones, and newcomers for the batch."""
    bed = CoreBed(max_num_seqs=3, batching_mode=mode)
    a, b = bed.add(prompt(3), 2), bed.add(prompt(3, 1), 20)
    bed.step()
    c = bed.add(prompt(3, 2), 2)
    bed.run()
    assert bed.reasons(c)[0] is Reason.BATCHING_MODE
    started = next(i for i, ran in enumerate(bed.ran()) if c in ran)
    assert started == 20
    assert all(c not in ran for ran in bed.ran()[:20])
    assert [bed.outputs[x] for x in (a, b)] == [alone(prompt(3), 2), alone(prompt(3, 1), 20)]


def test_padding_makes_room_before_anybody_is_preempted() -> None:
    """A batch that fits only without its finished rows still ends undisturbed."""
    bed = CoreBed(num_blocks=9, max_num_seqs=2, batching_mode="static", enable_prefix_caching=False)
    bed.add(prompt(16), 2)
    b = bed.add(prompt(8, 1), 24)
    bed.run()
    assert bed.scheduler.stats().num_preemptions == 0
    assert bed.outputs[b] == alone(prompt(8, 1), 24)


def test_an_abort_leaves_no_padding() -> None:
    """Who goes away costs nothing any more, in no mode."""
    bed = CoreBed(max_num_seqs=2, batching_mode="static")
    a, b = bed.add(prompt(3), 30), bed.add(prompt(3, 1), 9)
    bed.step()
    bed.scheduler.finish(a, "abort")
    bed.step()
    assert bed.ran()[-1] == {b}
    bed.run()


def mixed_lengths(num_requests: int) -> list[int]:
    """40 % below 100 tokens, 40 % from 100 to 500, 20 % above."""
    rng = random.Random(14)
    ranges = [(10, 100)] * 4 + [(100, 500)] * 4 + [(500, 1000)] * 2
    lengths = [rng.randrange(*ranges[i % 10]) for i in range(num_requests)]
    rng.shuffle(lengths)
    return lengths


def test_mixed_lengths_waste_a_static_batch_and_not_a_continuous_one() -> None:
    """R14, R15, R17: batch 32: 30-50 % of the slots used, against over 90 % with a backlog."""
    used, steps = {}, {}
    for mode in ("static_dropped", "continuous"):
        bed = CoreBed(num_blocks=5000, block_size=16, max_num_seqs=32, batching_mode=mode)
        scheduler = bed.scheduler
        for i, num_output in enumerate(mixed_lengths(320)):
            bed.add([i], num_output, ignore_eos=True)
        num_tokens = num_slots = 0
        steps[mode] = 0
        while scheduler.has_unfinished():
            plan = scheduler.schedule()
            backlog = scheduler.num_waiting > 0 or mode != "continuous"
            num_tokens += len(plan.scheduled) * backlog
            num_slots += 32 * backlog
            steps[mode] += 1
            bed.take(scheduler.update_from_output(plan, sampled_zeros(plan)))
        used[mode] = num_tokens / num_slots
    assert 0.30 <= used["static_dropped"] <= 0.50
    assert used["continuous"] > 0.90
    assert steps["static_dropped"] / steps["continuous"] > 2


def sampled_zeros(plan: SchedulerOutput) -> StepResult:
    """A step's result without a model."""

    tokens = tuple(SampledToken(entry.row, 0) for entry in plan.scheduled if entry.samples)
    return StepResult(plan.step, tokens)


def test_contiguous_reservation_fits_fewer_requests_than_paging() -> None:
    """R32, R33: floor(memory / max_model_len) requests, against all of them, in the same blocks."""
    num_running = {}
    for kind in ("contiguous", "paged"):
        bed = CoreBed(
            num_blocks=26,
            max_model_len=24,
            kv_reservation=kind,
            enable_prefix_caching=False,
        )
        for i in range(10):
            bed.add(prompt(3, i), 4)
        bed.step()
        num_running[kind] = len(bed.scheduler.running)
        bed.run()
        assert [bed.outputs[i] for i in range(10)] == [alone(prompt(3, i), 4) for i in range(10)]
    assert num_running == {"contiguous": 26 * 4 // 24, "paged": 10}


def test_a_reservation_is_one_range_whatever_was_freed_before() -> None:
    """R32: and what is freed serves only whole reservations."""
    rng = random.Random(32)
    bed = CoreBed(
        num_blocks=26, max_model_len=24, kv_reservation="contiguous", enable_prefix_caching=False
    )
    for i in range(60):
        bed.add(prompt(rng.randrange(1, 12), i), rng.randrange(1, 12))
        bed.step()
        for request in bed.scheduler.running.values():
            first = request.block_ids[0]
            assert request.block_ids == list(range(first, first + 6))
            assert first % 6 == 0
    bed.run()


def test_contiguous_reservation_refuses_what_it_can_not_do() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is True"):
        CoreBed(kv_reservation="contiguous")
    with pytest.raises(ConfigError, match="num_kv_blocks is 3, but must be at least 6"):
        CoreBed(
            num_blocks=3,
            max_model_len=24,
            kv_reservation="contiguous",
            enable_prefix_caching=False,
        )
    with pytest.raises(ConfigError, match="kv_reservation is 'heap'"):
        CoreBed(kv_reservation="heap")
    bed = CoreBed(
        num_blocks=6, max_model_len=24, kv_reservation="contiguous", enable_prefix_caching=False
    )
    with pytest.raises(RequestTooLarge):
        bed.add(prompt(24), 2)
    assert bed.requests == {}
