"""Tiers below the pool: swapped requests and evicted prefixes; bounded, exact, never in the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.core_bed import CoreBed, alone
from beds.workloads import Work, run, workloads
from octavo.config import EngineConfig, SchedulerConfig, make_config
from octavo.core.event_log import Reason
from octavo.errors import ConfigError
from octavo.messages import KeptRun, ModelCosts, Moved, Timing
from octavo.request import Status

FEWER = settings().max_examples // 2
MEANS = ["recompute", "swap", "threshold", "auto"]


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


@given(
    workloads,
    st.integers(5, 9),
    st.integers(1, 24),
    st.sampled_from(MEANS),
    st.tuples(st.sampled_from([0, 1, 3, 40]), st.sampled_from([0, 2, 40])),
    st.booleans(),
    st.integers(0, 12),
)
def test_tiers_never_change_an_answer(
    workload: list[Work],
    num_blocks: int,
    budget: int,
    means: str,
    num_slots: tuple[int, int],
    prefix_caching: bool,
    threshold: int,
) -> None:
    """R98, R100, C25: any means, any size of the tiers, n answers, scopes: batched = alone.

    TapeModel checks owner and position of every slot that is read, and the size of the tiers.
    """
    bed = CoreBed(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
        preemption_mode=means,
        swap_threshold=threshold,
        num_slots=num_slots,
    )
    run(workload, bed)
    swapped = bed.scheduler.event_log.counts[Reason.SWAPPED]
    assert means != "recompute" or not swapped


@given(workloads, st.integers(1, 9), st.sampled_from(MEANS), st.integers(0, 6), st.data())
@settings(max_examples=FEWER)
def test_swapped_equals_undisturbed(
    workload: list[Work], budget: int, means: str, num_slots: int, data: st.DataObject
) -> None:
    """R98: anybody may be preempted after any step, cached blocks and slots may go at any time."""
    bed = CoreBed(
        num_blocks=24,
        max_num_batched_tokens=budget,
        preemption_mode=means,
        swap_threshold=5,
        num_slots=(num_slots, 3),
    )
    scheduler = bed.scheduler

    def disturb(step: int) -> None:
        kv = scheduler.kv
        choice = data.draw(st.integers(0, 5)) if step < 30 else 0
        if choice == 1 and scheduler.running:
            scheduler.preempt(data.draw(st.sampled_from(sorted(scheduler.running))))
        elif choice == 2:
            kv.pool.release(kv.cache.evict(3, kv._save))
            kv._release_dropped()
        elif choice == 3:
            kv._release_slots(kv.cache.evict_slots(2))
        elif choice == 4:
            kv.pool.release(kv.cache.evict(2))
            kv._release_dropped()

    run(workload, bed, disturb)
    run(workload, bed, disturb)


def squeezed(means: str, **settings: object) -> CoreBed:
    """Two requests that do not fit together: the second yields."""
    settings = {"num_blocks": 6, "num_slots": (8, 0), "enable_prefix_caching": False, **settings}
    bed = CoreBed(preemption_mode=means, **settings)  # type: ignore[arg-type]
    bed.add(prompt(9), 12)
    bed.add(prompt(9, 1), 12)
    return bed


def test_a_swapped_request_goes_on_without_recomputing() -> None:
    """R98: its K/V leave and come back, and it computes each token once."""
    bed = squeezed("swap")
    while not bed.events(Reason.SWAPPED):
        bed.step()
    victim = bed.requests[1]
    assert victim.status is Status.PREEMPTED
    assert victim.swapped is not None
    assert victim.swapped.num_tokens == len(bed.outputs[1]) + 9 - 1
    bed.run()
    assert [bed.outputs[i] for i in (0, 1)] == [alone(prompt(9), 12), alone(prompt(9, 1), 12)]
    stats = bed.scheduler.stats()
    assert stats.num_preemptions >= 1
    assert stats.recomputed_tokens == 0
    assert bed.num_computed() == 2 * (9 + 11)
    assert bed.scheduler.kv.slots.num_free == 8
    assert bed.model.moves["store"] == bed.model.moves["load"] > 0


@pytest.mark.parametrize("num_slots", [(0, 0), (1, 0), (1, 1)])
def test_full_tiers_fall_back_to_recompute(num_slots: tuple[int, int]) -> None:
    """R98: logged with both numbers, and nobody waits for room in a tier."""
    bed = squeezed("swap", num_slots=num_slots).run()
    assert bed.events(Reason.SWAPPED) == []
    wanted, had = bed.events(Reason.TIERS_FULL)[0].detail
    assert wanted > had == sum(num_slots)  # type: ignore[operator]
    assert [bed.outputs[i] for i in (0, 1)] == [alone(prompt(9), 12), alone(prompt(9, 1), 12)]


def test_short_ones_are_recomputed_and_long_ones_swapped() -> None:
    """R100: 128 computed tokens by default, or as set."""
    assert SchedulerConfig().swap_threshold == 128
    for length, swapped in ((126, 0), (127, 0), (128, 1), (140, 1)):
        bed = CoreBed(preemption_mode="threshold", num_slots=(64, 0))
        bed.add(prompt(length), 4)
        bed.step()
        assert bed.requests[0].num_computed_tokens == length
        bed.scheduler.preempt(0)
        assert len(bed.events(Reason.SWAPPED)) == swapped
        bed.run()
        assert bed.outputs[0] == alone(prompt(length), 4)


@pytest.mark.parametrize(
    ("block_us", "token_us", "swapped"), [(10, 100, True), (1000, 100, False), (600, 100, True)]
)
def test_auto_takes_what_measured_rates_say(block_us: int, token_us: int, swapped: bool) -> None:
    """R101, R102: 20 tokens in 5 blocks, moved twice: both estimates are in the log."""
    bed = CoreBed(preemption_mode="auto", num_slots=(16, 0))
    if block_us == 600:
        block_us = 199  # just below what computing costs
    bed.add(prompt(20), 4)
    bed.step()
    bed.set_rates(us_per_token=token_us, store=(block_us, 1), load=(block_us, 1))
    bed.scheduler.preempt(0)
    assert bool(bed.events(Reason.SWAPPED)) is swapped
    assert bed.events(Reason.ESTIMATED)[0].detail == (10 * block_us, 20 * token_us)
    bed.run()
    assert bed.outputs[0] == alone(prompt(20), 4)


@pytest.mark.parametrize(
    ("nbytes", "flops", "slots", "estimates"),
    [
        (1_000_000, 10_000_000, (16, 0), (2 * 5 * 40, 20 * 20)),  # equal: no use in moving
        (1_000_000, 10_100_000, (16, 0), (2 * 5 * 40, 404)),
        (1_000_000, 100_000_000, (0, 16), (2 * 5 * 1000, 20 * 200)),
        (1_000_000, 1_000_000_000, (0, 16), (2 * 5 * 1000, 20 * 2000)),
    ],
)
def test_auto_goes_by_the_book_until_it_has_measured(
    nbytes: int, flops: int, slots: tuple[int, int], estimates: tuple[int, int]
) -> None:
    """R101: bytes at 25 GB/s each way (1 GB/s in a file) against operations of a prefill."""
    bed = CoreBed(preemption_mode="auto", num_slots=slots, costs=ModelCosts(nbytes, flops))
    bed.add(prompt(20), 4)
    bed.step()
    bed.scheduler.preempt(0)
    assert bed.events(Reason.ESTIMATED)[0].detail == estimates
    assert len(bed.events(Reason.SWAPPED)) == (estimates[0] < estimates[1])
    bed.run()
    assert bed.outputs[0] == alone(prompt(20), 4)


def measure(bed: CoreBed, timing: Timing) -> None:
    """A step of the bed that took so long."""
    plan = bed.scheduler.schedule()
    result = bed.model.submit(plan)._replace(timing=timing)
    bed.take(bed.scheduler.update_from_output(plan, result))


def test_what_is_measured_replaces_the_book_and_one_hindered_step_does_not() -> None:
    """R101, R102: a quarter of the newest in the average, which it may exceed four times; what a
    step computes is measured from the first on."""
    bed = CoreBed(preemption_mode="auto", num_slots=(16, 0), costs=ModelCosts(250_000, 1))
    bed.add(prompt(20), 9)
    measure(bed, Timing(20, 2000, (Moved("store", 0, 5, 50), Moved("load", 0, 5, 50))))
    bed.scheduler.preempt(0)
    assert bed.events(Reason.ESTIMATED)[-1].detail == (5 * 20, 20 * 100)
    measure(bed, Timing(20, 2_000_000, (Moved("load", 0, 5, 5_000_000),)))
    bed.scheduler.preempt(0)
    wanted = (round(6 * (10 + 10 * 1.75)), round(21 * 100 * 1.75))
    assert bed.events(Reason.ESTIMATED)[-1].detail == wanted
    for _ in range(30):
        bed.scheduler.rates.observe(Timing(20, 1000, (Moved("load", 0, 5, 50_000),)))
    assert bed.scheduler.rates.swap_us(1, 0) == pytest.approx(10 + 10_000, rel=0.01)
    assert bed.scheduler.rates.recompute_us(20) == pytest.approx(1000, rel=0.01)
    bed.run()


def with_a_prefix_in_the_file() -> CoreBed:
    """20 tokens computed, evicted into the file: 5 blocks at most in it."""
    bed = CoreBed(num_blocks=8, num_slots=(0, 40))
    bed.add(prompt(20), 4)
    bed.run()
    for i in range(1, 4):
        bed.add(prompt(28, i), 4)
        bed.run()
    return bed


def test_what_is_quicker_to_compute_is_not_read_from_a_slow_tier() -> None:
    """Measured rates decide: a block of 4 tokens takes 400 us to compute. It is logged, and the
    computed blocks take the place."""
    bed = with_a_prefix_in_the_file()
    bed.set_rates(us_per_token=100, load=(1, 401))
    num_loads = bed.model.moves["load"]
    again = bed.add(prompt(20), 4)
    bed.run()
    num_blocks, load_us = bed.events(Reason.TIER_SLOW)[0].detail
    assert load_us == 401 * num_blocks  # type: ignore[operator]
    assert bed.events(Reason.TIER_SLOW)[0].request_id == again
    assert bed.model.moves["load"] == num_loads
    assert bed.requests[again].num_cached_tokens == 0
    assert bed.outputs[again] == alone(prompt(20), 4)


def test_what_is_quicker_to_read_is_read_from_a_slow_tier() -> None:
    bed = with_a_prefix_in_the_file()
    bed.set_rates(us_per_token=100, load=(1, 399))
    again = bed.add(prompt(20), 4)
    bed.run()
    assert not bed.events(Reason.TIER_SLOW)
    assert bed.requests[again].num_cached_tokens >= 16
    assert bed.outputs[again] == alone(prompt(20), 4)


def test_a_tier_that_was_slow_is_tried_again() -> None:
    """Nobody measures what nobody uses: with each refusal its rate is doubted a little more."""
    bed = with_a_prefix_in_the_file()
    bed.set_rates(us_per_token=100, load=(1, 800))
    for i in range(60):
        bed.add(prompt(20), 4)
        bed.add(prompt(28, 5 + i % 2), 4)
        bed.run()
    num_refused = bed.scheduler.event_log.counts[Reason.TIER_SLOW]
    assert 30 < num_refused < 60
    assert bed.scheduler.event_log.counts[Reason.LOADED] > 0


def test_a_prefix_is_read_from_ram_however_slow_the_file_is() -> None:
    """As far as it is in RAM, which holds what was stored last: a path is stored from its end."""
    bed = CoreBed(num_blocks=8, num_slots=(3, 40))
    for i in range(3):
        bed.add(prompt(24, i), 4)
        bed.run()
    bed.set_rates(us_per_token=100, load=(1, 10**6))
    in_ram = bed.scheduler.rates._in_ram
    for i in (1, 0):
        match = bed.scheduler.kv.cache.match(prompt(24, i), 23)
        assert match is not None
        num_in_ram = sum(slot in in_ram for slot in match.slots)
        assert 0 < num_in_ram < len(match.slots) or i == 0
        again = bed.add(prompt(24, i), 2)
        num_loads = bed.model.moves["load"]
        bed.run()
        assert bed.model.moves["load"] - num_loads == num_in_ram
        assert bed.outputs[again] == alone(prompt(24, i), 2)


def test_what_is_read_at_the_start_is_in_ram_from_its_beginning() -> None:
    """The first slots of the tiers are filled from the last to the first."""
    bed = CoreBed(num_slots=(2, 10))
    bed.scheduler.import_prefixes([KeptRun("", -1, tuple(prompt(20)), (0, 1, 2, 3, 4), True)])
    bed.set_rates(us_per_token=100, load=(1, 10**6))
    bed.add(prompt(21), 2)
    bed.scheduler.schedule()
    assert bed.requests[0].num_cached_tokens == 8


def test_each_tier_has_its_own_rate() -> None:
    """R101: the file is slow, RAM is not: what counts is where the K/V would go."""
    bed = CoreBed(preemption_mode="auto", num_slots=(5, 16))
    bed.add(prompt(20), 4)
    bed.add(prompt(20, 1), 4)
    bed.step()
    bed.set_rates(us_per_token=100, store=(1, 100_000))
    bed.scheduler.preempt(1)
    bed.scheduler.preempt(0)
    assert [event.request_id for event in bed.events(Reason.SWAPPED)] == [1]
    bed.run()


def test_nobody_overtakes_a_swapped_request() -> None:
    """R106, C26: 50 requests, n = 4, 32 blocks: while somebody is swapped, nobody who came later
    starts; the tier is bounded, and all 200 answers come."""
    bed = CoreBed(
        num_blocks=32,
        max_num_seqs=24,
        max_num_batched_tokens=24,
        preemption_mode="swap",
        num_slots=(24, 8),
    )
    for i in range(50):
        leader = bed.add(prompt(5 + i % 7, i), 9)
        for _ in range(3):
            bed.add(prompt(5 + i % 7, i), 9, leader=leader)
    while bed.scheduler.has_unfinished():
        swapped = [r.request_id for r in bed.scheduler.waiting if r.swapped is not None]
        plan = bed.step()
        late = [start.request_id for start in plan.starts]
        assert not swapped or not late or min(late) <= min(swapped)
        assert late == sorted(late)
        assert bed.scheduler.kv.slots.num_free >= 0
    assert bed.scheduler.event_log.counts[Reason.SWAPPED] > 10
    for request_id, output in bed.outputs.items():
        i = request_id // 4
        assert output == alone(prompt(5 + i % 7, i), 9)


def test_every_prompt_gets_its_own_tokens_back() -> None:
    """C25: 20 prompts, an alphabet each, a pool of a quarter of the need, a tier below it."""
    for means in MEANS:
        bed = CoreBed(num_blocks=40, preemption_mode=means, num_slots=(60, 60), swap_threshold=9)
        for _ in range(2):
            ids = [bed.add(prompt(24, i), 9) for i in range(20)]
            bed.run()
            assert [bed.outputs[i] for i in ids] == [alone(prompt(24, i), 9) for i in range(20)]
        assert bed.model.moves["load"] > 0


def test_an_evicted_prefix_comes_back_from_a_tier() -> None:
    """A prefix that lives longer than its blocks: evicted under pressure, loaded on a hit."""
    bed = CoreBed(num_blocks=8, num_slots=(4, 20))
    first = bed.add(prompt(20), 4)
    bed.run()
    for i in range(1, 4):
        bed.add(prompt(28, i), 4)
        bed.run()
    again = bed.add(prompt(20), 4)
    bed.run()
    assert bed.outputs[first] == bed.outputs[again] == alone(prompt(20), 4)
    assert bed.requests[again].num_cached_tokens >= 16
    assert bed.events(Reason.LOADED)[-1].request_id == again
    assert bed.scheduler.kv.slots.num_free >= 0


def test_swapped_requests_have_the_tiers_before_cached_prefixes() -> None:
    """Slots of prefixes are given up for K/V that would be lost otherwise."""
    bed = CoreBed(num_blocks=6, num_slots=(5, 0), preemption_mode="swap")
    for i in range(3):
        bed.add(prompt(20, i), 4)
        bed.run()
    assert bed.scheduler.kv.slots.num_free == 0
    bed.add(prompt(9, 5), 12)
    bed.add(prompt(9, 6), 12)
    bed.run()
    assert bed.scheduler.event_log.counts[Reason.SWAPPED] > 0
    assert bed.outputs[3] == alone(prompt(9, 5), 12)
    assert bed.outputs[4] == alone(prompt(9, 6), 12)


def test_scopes_do_not_meet_in_a_tier() -> None:
    """C94: not one token, whichever way the K/V went."""
    bed = CoreBed(num_blocks=6, num_slots=(20, 0))
    for i, scope in enumerate(("x", "y", "x")):
        bed.add(prompt(20), 4, scope=scope)
        bed.run()
        bed.add(prompt(20, i + 1), 4)
        bed.run()
    assert [bed.requests[i].num_cached_tokens for i in (0, 2)] == [0, 0]
    assert bed.requests[4].num_cached_tokens > 0


def test_what_nobody_needs_any_more_leaves_the_tiers() -> None:
    """The plan says so: at the end there is in the tiers what the tree has in them, no more."""
    bed = CoreBed(num_blocks=6, num_slots=(4, 4), preemption_mode="swap")
    for i in range(6):
        bed.add(prompt(9, i % 3), 9)
        bed.add(prompt(9, i % 2), 9)
        bed.run()
    bed.model.submit(bed.scheduler.schedule())  # what the last ones gave up
    assert sorted(bed.model.kept) == sorted(bed.scheduler.kv.cache.slots())
    assert len(bed.events(Reason.DROPPED)) > 0


def test_an_abort_gives_the_slots_back() -> None:
    """C16: of a request that waits in a tier."""
    bed = squeezed("swap")
    while not bed.events(Reason.SWAPPED):
        bed.step()
    assert bed.scheduler.kv.slots.num_free < 8
    bed.scheduler.finish(1, "abort")
    bed.scheduler.audit()
    assert bed.scheduler.kv.slots.num_free == 8
    bed.run()


def test_swapping_needs_somewhere_to_go() -> None:
    """A user's mistake is said at the start."""
    with pytest.raises(ConfigError, match="ram_tier_memory"):
        make_config(preemption_mode="swap")
    assert isinstance(make_config(preemption_mode="swap", ram_tier_memory=1 << 20), EngineConfig)
