"""Who waits, who goes first, who yields: each policy has a test of what it promises."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from beds.core_bed import CoreBed, alone
from octavo.core.event_log import Reason
from octavo.core.fair_share import PROMPT_COST, TOKEN_COST, FairShare
from octavo.core.policy import LongestPrefix
from octavo.core.preemption import VICTIM_POLICIES
from octavo.errors import ConfigError
from octavo.request import Request, Status
from octavo.sampling_params import SamplingParams


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def order_of_starts(bed: CoreBed) -> list[int]:
    """Requests in the order in which they first ran."""
    started = [request_id for trace in bed.model.traces for request_id in trace.started]
    return list(dict.fromkeys(started))


def first_step(bed: CoreBed, request_id: int) -> int:
    return next(i for i, ran in enumerate(bed.ran()) if request_id in ran)


# Priority.


def test_the_better_priority_goes_first() -> None:
    """R95: [A 2, B 3, C 1], higher first as in the worked example: B, A, C; else C, A, B."""
    for order, wanted in (("high_first", [1, 0, 2]), ("low_first", [2, 0, 1])):
        bed = CoreBed(max_num_seqs=1, scheduling_policy="priority", priority_order=order)
        for i, priority in enumerate((2, 3, 1)):
            bed.add(prompt(3, i), 2, priority=priority)
        bed.run()
        assert order_of_starts(bed) == wanted


def test_equal_priorities_go_by_arrival_however_they_come_in() -> None:
    """C8: two prompts of three answers each, all alike; 50 orders of insertion, one result."""
    for shuffle in range(50):
        bed = CoreBed(max_num_seqs=2, scheduling_policy="priority")
        numbers = list(range(6))
        random.Random(shuffle).shuffle(numbers)
        for number in numbers:
            request = Request(number, prompt(3, number), SamplingParams(), max_tokens=2, priority=7)
            bed.scheduler.add(request)
            bed.requests[number], bed.outputs[number] = request, []
        bed.run()
        assert order_of_starts(bed) == list(range(6))


def test_a_better_arrival_preempts_worse_ones_and_starts_in_that_step() -> None:
    """R97: it takes the blocks of who generated most, and nobody else is admitted (R105)."""
    bed = CoreBed(
        num_blocks=52,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        victim_policy="most_generated",
    )
    a = bed.add(prompt(8), 120, priority=2)
    for _ in range(50):
        bed.step()
    c = bed.add(prompt(8, 1), 120, priority=2)
    for _ in range(40):
        bed.step()
    b = bed.add(prompt(8, 2), 120, priority=2)
    for _ in range(10):
        bed.step()
    assert [bed.requests[x].num_output_tokens for x in (a, b, c)] == [100, 10, 50]
    d = bed.add(prompt(40, 3), 3, priority=1)
    e = bed.add(prompt(4, 4), 3, priority=2)
    plan = bed.step()
    assert bed.requests[a].status is Status.PREEMPTED
    assert bed.ran()[-1] == {b, c, d}
    assert [start.request_id for start in plan.starts] == [d]
    assert bed.reasons(a)[-1] is Reason.PREEMPTION_STEP
    assert bed.requests[e].status is Status.WAITING
    bed.run()
    assert bed.outputs[a] == alone(prompt(8), 120)


def test_a_better_arrival_takes_a_row_when_there_is_none() -> None:
    """R97: max_num_seqs counts as room, too; equals are left alone."""
    bed = CoreBed(max_num_seqs=2, scheduling_policy="priority")
    a, b = bed.add(prompt(3), 20, priority=1), bed.add(prompt(3, 1), 20, priority=5)
    bed.step()
    c = bed.add(prompt(3, 2), 2, priority=1)
    bed.step()
    assert bed.ran()[-1] == {a, c}
    assert bed.requests[b].num_preemptions == 1
    d = bed.add(prompt(3, 3), 2, priority=1)
    bed.step()
    assert d not in bed.ran()[-1]
    bed.run()


def test_nobody_is_preempted_in_vain() -> None:
    """All worse ones together would not make room: they run on."""
    bed = CoreBed(num_blocks=10, scheduling_policy="priority", enable_prefix_caching=False)
    a, b = bed.add(prompt(22), 8, priority=1), bed.add(prompt(3, 1), 8, priority=2)
    bed.step()
    c = bed.add(prompt(24, 2), 3, priority=0 + 1)
    d = bed.add(prompt(30, 3), 3, priority=0)
    bed.step()
    assert bed.ran()[-1] == {d}, "both yield to the best"
    bed.run()
    bed = CoreBed(num_blocks=10, scheduling_policy="priority", enable_prefix_caching=False)
    a, b = bed.add(prompt(22), 8, priority=1), bed.add(prompt(3, 1), 8, priority=2)
    bed.step()
    c = bed.add(prompt(24, 2), 3, priority=1)
    bed.step()
    assert bed.ran()[-1] == {a, b}
    assert bed.reasons(c) == [Reason.NO_BLOCKS]
    assert bed.scheduler.stats().num_preemptions == 0
    bed.run()


def test_a_preempted_request_is_never_ahead_of_a_better_priority() -> None:
    """And ahead of its equals, though they came before it (R96)."""
    bed = CoreBed(scheduling_policy="priority", max_num_seqs=1)
    ids = [bed.add(prompt(3, i), 9, priority=p) for i, p in enumerate((1, 1, 0, 2))]
    assert [r.request_id for r in bed.scheduler.waiting] == [2, 0, 1, 3]
    bed.step()
    bed.scheduler.preempt(2)
    assert [r.request_id for r in bed.scheduler.waiting] == [2, 0, 1, 3]
    bed.scheduler.finish(2, "abort")
    bed.step()
    bed.scheduler.preempt(0)
    better = bed.add(prompt(3, 9), 9, priority=0)
    assert [r.request_id for r in bed.scheduler.waiting] == [better, 0, 1, 3]
    bed.run()
    assert bed.outputs[ids[0]] == alone(prompt(3), 9)


def endless(bed: CoreBed, first: int, steps: int, **request: object) -> int | None:
    """Add one more request in each step; the step in which request `first` started, if it did."""
    for step in range(steps):
        bed.add(prompt(5, 100 + step), 1, **request)  # type: ignore[arg-type]
        bed.step()
        if bed.requests[first].status is not Status.WAITING:
            return step
    return None


def test_without_ageing_better_priorities_starve_a_worse_one_by_design() -> None:
    """C10: documented; ageing is the cure, with a bound: (10 - 7) x 30 steps, and one in hand."""
    for ageing, wanted in ((0, None), (30, range(85, 96))):
        bed = CoreBed(
            max_num_seqs=1, scheduling_policy="priority", priority_ageing_steps=ageing
        )  # fmt: skip
        bed.add(prompt(3, 1), 2, priority=7)
        worst = bed.add(prompt(3), 2, priority=10)
        started = endless(bed, worst, 300, priority=7)
        assert started is None if wanted is None else started in wanted
        bed.run()


def test_who_aged_for_long_enough_is_not_sent_back_by_a_young_better_one() -> None:
    """Else ageing would bound the start, and not the end."""
    bed = CoreBed(max_num_seqs=1, scheduling_policy="priority", priority_ageing_steps=5)
    old = bed.add(prompt(3), 60, priority=2)
    for _ in range(8):
        bed.step()
    bed.add(prompt(3, 1), 2, priority=1)
    bed.step()
    assert bed.ran()[-1] == {old}
    bed.run()
    assert bed.requests[old].num_preemptions == 0


# The longest prefix.


def test_the_longest_cached_prefix_goes_first() -> None:
    """R107, R117: looked up when somebody can be admitted, not when it came."""
    bed = CoreBed(max_num_seqs=1, scheduling_policy="longest_prefix")
    stem = prompt(24)
    seed = bed.add(stem, 2)
    bed.step()
    cold = bed.add(prompt(10, 1), 2)
    short, long = bed.add([*stem[:12], 9], 2), bed.add([*stem[:20], 9], 2)
    bed.run()
    assert order_of_starts(bed) == [seed, long, short, cold]
    assert [bed.requests[x].num_cached_tokens for x in (long, short)] == [20, 12]


def test_a_cold_request_is_overtaken_a_bounded_number_of_times() -> None:
    """C10: a hot prompt in every step; the cold one waits for at most overtake_limit of them."""
    bed = CoreBed(
        num_blocks=200, max_num_seqs=1, scheduling_policy="longest_prefix", overtake_limit=64
    )
    hot = prompt(16)
    bed.add(hot, 1)
    bed.step()
    cold = bed.add(prompt(16, 1), 1)
    for i in range(500):
        bed.add([*hot, i], 1)
        bed.step()
    assert 30 < first_step(bed, cold) <= 66
    assert len(order_of_starts(bed)[: order_of_starts(bed).index(cold)]) <= 65
    bed.run()


def test_nobody_leaves_more_than_the_limit_later_than_by_arrival() -> None:
    """The bound, for everybody, in a queue whose order keeps changing."""
    rng = random.Random(10)
    limit = 7
    bed = CoreBed(
        num_blocks=60, max_num_seqs=2, scheduling_policy="longest_prefix", overtake_limit=limit
    )
    for _ in range(150):
        stem = prompt(20, rng.randrange(4))
        bed.add([*stem[: rng.randrange(21)], rng.randrange(10**6)], rng.randrange(1, 6))
        if rng.random() < 0.3:
            bed.step()
    bed.run()
    starts = order_of_starts(bed)
    late = [starts.index(i) - i for i in range(150)]
    assert max(late) <= limit
    assert max(late) > limit // 2, "the order did differ from that of arrival"


def test_a_long_queue_is_matched_in_its_window_only() -> None:
    """C109: 5,000 waiting cost no more look-ups than 200; the first 128 are in cache order."""
    lookups = {}
    for num_waiting in (200, 5000):
        bed = CoreBed(num_blocks=400, max_num_seqs=2, scheduling_policy="longest_prefix")
        stem = prompt(40)
        bed.add(stem, 40)
        bed.step()
        for i in range(num_waiting):
            bed.add([*stem[: 4 * (i % 10)], *prompt(20, i + 1)], 2)
        calls: list[int] = []
        kv = bed.scheduler.kv
        count = kv.num_hit_blocks

        def counted(request: Request, count=count, calls=calls) -> int:  # type: ignore[no-untyped-def]
            calls.append(request.request_id)
            return int(count(request))

        kv.num_hit_blocks = counted  # type: ignore[method-assign]
        for _ in range(4):
            bed.step()
        lookups[num_waiting] = len(calls)
        assert order_of_starts(bed)[1] == 10, "the first of the longest, among the first 128"
        ahead = [request.request_id for request in bed.scheduler.waiting][:3]
        assert all((i - 1) % 10 == 9 for i in ahead)
    assert lookups[200] == lookups[5000] <= 4 * LongestPrefix.WINDOW


# Fair share.


def service(bed: CoreBed, requests: list[int]) -> int:
    """What a tenant was given, in the units of fair_share."""
    given = 0
    for request in (bed.requests[i] for i in requests):
        if bed.reasons(request.request_id):
            started = request.status is not Status.WAITING
            given += PROMPT_COST * request.num_prompt_tokens * started
            given += TOKEN_COST * request.num_output_tokens
    return given


def test_a_flood_of_one_tenant_does_not_take_the_share_of_another() -> None:
    """Both wait all the time: their service differs by a batch and a prompt, not by the flood."""
    bed = CoreBed(max_num_seqs=4, num_blocks=200, scheduling_policy="fair_share")
    flood = [bed.add(prompt(8, i), 8, tenant="flood") for i in range(200)]
    modest = [bed.add(prompt(8, 500 + i), 8, tenant="modest") for i in range(40)]
    bound = 2 * max(PROMPT_COST * 8, TOKEN_COST * 8 * 4)
    for _ in range(80):
        bed.step()
        assert abs(service(bed, flood) - service(bed, modest)) <= bound
    assert bed.scheduler.num_waiting > 100
    assert service(bed, modest) > 400
    bed.run()


def test_idleness_earns_no_credit_and_costs_no_memory() -> None:
    """Who comes late starts with the others' counter, and is forgotten when it is gone."""
    bed = CoreBed(max_num_seqs=1, num_blocks=200, scheduling_policy="fair_share")
    order = bed.scheduler.waiting
    assert isinstance(order, FairShare)
    early = [bed.add(prompt(8, i), 8, tenant="early") for i in range(30)]
    for _ in range(100):
        bed.step()
    late = [bed.add(prompt(8, 100 + i), 8, tenant="late") for i in range(30)]
    for _ in range(8 * 20):
        bed.step()
    ran = [x for x in order_of_starts(bed) if x in late]
    others = [x for x in order_of_starts(bed) if x in early][12:]
    assert abs(len(ran) - len(others)) <= 2, "turn about, not all the late ones first"
    bed.run()
    for i in range(1000):
        bed.add([i], 1, tenant=f"tenant {i}")
        bed.run()
    assert len(order.counters) <= 70
    assert len(order._heap) <= 70


def test_fair_share_shows_its_queue_in_the_order_in_which_it_serves() -> None:
    """Tenants that got equally much go by arrival, whatever they are called, for whoever looks
    past the head as for the head itself (skip_limit)."""
    bed = CoreBed(max_num_seqs=1, scheduling_policy="fair_share")
    for tenant in ("z", "a", "m", "a", "z"):
        bed.add([1, 2, 3], 3, tenant=tenant)
    order = bed.scheduler.waiting
    assert [request.request_id for request in order] == [0, 4, 1, 3, 2]
    assert next(iter(order)) is order.peek()


def test_fair_share_goes_by_arrival_inside_a_tenant() -> None:
    bed = CoreBed(max_num_seqs=1, scheduling_policy="fair_share")
    for i in range(12):
        bed.add(prompt(3, i), 2, tenant="ab"[i % 3 == 0])
    bed.run()
    starts = order_of_starts(bed)
    for tenant in (0, 1):
        own = [i for i in starts if (i % 3 == 0) == tenant]
        assert own == sorted(own)
    assert any(a > b for a, b in pairwise(starts))


# A head that does not fit.


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest_prefix", "fair_share"])
def test_small_ones_pass_a_big_one_a_bounded_number_of_times(policy: str) -> None:
    """C11: skip_limit 0 is strict; with 5, five small ones pass, and then the big one starts."""
    for skip_limit in (0, 5):
        bed = CoreBed(
            num_blocks=10,
            enable_prefix_caching=False,
            scheduling_policy=policy,
            skip_limit=skip_limit,
        )
        bed.add(prompt(12), 5)
        bed.step()
        big = bed.add(prompt(30, 1), 2)
        smalls = [bed.add(prompt(3, 2), 2)]
        bed.step()
        assert (smalls[0] in bed.ran()[-1]) == bool(skip_limit)
        while bed.requests[big].status is Status.WAITING:
            smalls.append(bed.add(prompt(3, 2 + len(smalls)), 2))
            bed.step()
            assert len(smalls) < 40
        passed = [x for x in order_of_starts(bed) if x in smalls]
        assert len(passed) <= skip_limit + 2, "two may join in the step in which it starts"
        assert len(bed.events(Reason.PASSED_BY)) == bed.requests[big].num_passed_by <= skip_limit
        if not skip_limit:
            assert order_of_starts(bed) == sorted(order_of_starts(bed))
        bed.run()


def test_head_of_line_blocking_of_fcfs() -> None:
    """R94: the same small request waits for a long one, or does not; the price is the order."""
    waited = {}
    for skip_limit in (0, 1):
        bed = CoreBed(num_blocks=10, enable_prefix_caching=False, skip_limit=skip_limit)
        bed.add(prompt(12), 25)
        bed.step()
        bed.add(prompt(30, 1), 2)
        small = bed.add(prompt(3, 2), 2)
        bed.run()
        waited[skip_limit] = first_step(bed, small)
    assert waited[1] == 1
    assert waited[0] > 20


def test_a_head_that_waits_for_something_else_is_not_passed() -> None:
    """skip_limit is about blocks; with no row or no budget nobody could join anyway."""
    bed = CoreBed(max_num_seqs=1, skip_limit=4)
    bed.add(prompt(3), 9)
    bed.step()
    bed.add(prompt(3, 1), 2)
    bed.add(prompt(3, 2), 2)
    bed.run()
    assert order_of_starts(bed) == [0, 1, 2]
    assert bed.events(Reason.PASSED_BY) == []


# Victims.


@pytest.mark.parametrize(
    ("victim", "wanted"),
    [("last_arrived", 2), ("lowest_priority", 1), ("most_generated", 0), ("fewest_generated", 1)],
)
def test_each_victim_policy_takes_who_it_names(victim: str, wanted: int) -> None:
    """R97: of A with 500 tokens generated, B with 10 and C with 50, D's need takes A."""
    requests = []
    for i, (num_output, rank) in enumerate(((500, 1), (10, 2), (50, 2 if victim[0] == "m" else 1))):
        request = Request(i, prompt(8, i), SamplingParams(), max_tokens=600)
        request.token_ids += [0] * num_output
        request.rank = rank
        requests.append(request)
    policy = VICTIM_POLICIES[victim](lambda request: 0)
    assert policy.choose(requests).request_id == wanted
    assert policy.choose(requests[::-1]).request_id == wanted
    assert policy.choose(requests[:1]) is requests[0]


def test_a_worse_priority_in_need_never_takes_the_blocks_of_a_better_one() -> None:
    """Whatever the victim policy says: it yields itself, or takes those of its equals."""
    for victim in ("last_arrived", "most_generated", "fewest_generated"):
        bed = CoreBed(
            num_blocks=12,
            enable_prefix_caching=False,
            scheduling_policy="priority",
            victim_policy=victim,
        )
        bed.add(prompt(11, 1), 30, priority=3)
        bed.step()
        best = bed.add(prompt(8), 25, priority=1)
        bed.add(prompt(7, 2), 30, priority=3)
        bed.run()
        assert bed.scheduler.stats().num_preemptions > 0
        assert bed.requests[best].num_preemptions == 0
        assert bed.outputs == {
            0: alone(prompt(11, 1), 30),
            1: alone(prompt(8), 25),
            2: alone(prompt(7, 2), 30),
        }


def test_the_default_victim_follows_the_policy() -> None:
    assert CoreBed().config.victim == "last_arrived"
    assert CoreBed(scheduling_policy="priority").config.victim == "lowest_priority"
    assert CoreBed(victim_policy="most_generated").config.victim == "most_generated"


def test_impossible_settings_are_refused() -> None:
    for setting in ("skip_limit", "overtake_limit", "priority_ageing_steps"):
        with pytest.raises(ConfigError, match=f"{setting} is -1"):
            CoreBed(**{setting: -1})
    with pytest.raises(ConfigError, match="priority_order is 'vip'"):
        CoreBed(priority_order="vip")


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix", "fair_share"])
def test_running_beats_waiting_under_every_policy_but_priority(policy: str) -> None:
    """R103, R104, R106: the preempted first, then the waiting; nobody is preempted for them."""
    bed = CoreBed(num_blocks=8, enable_prefix_caching=False, scheduling_policy=policy)
    a, b = bed.add(prompt(12), 6), bed.add(prompt(12, 1), 8)
    while not bed.scheduler.stats().num_preemptions:
        bed.step()
    c = bed.add(prompt(3, 2), 2, priority=-5, tenant="new")
    assert [r.request_id for r in bed.scheduler.waiting] == [b, c]
    needy = {event.detail[1] for event in bed.events(Reason.PREEMPTED)}
    assert needy <= {a, b}
    bed.run()
    assert {event.detail[1] for event in bed.events(Reason.PREEMPTED)} <= {a, b}
