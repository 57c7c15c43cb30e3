"""Every combination of policy, victim, means, tiers and batching mode, one after the other.

The state machine draws among them; here none is left to chance. Each plays a life of its own (n
answers, scopes, limits, chunks and disturbances by a generator seeded with the combination), with
an audit after every step, in a pool that is too small.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import combinations, product

import pytest

from beds.core_bed import CoreBed, alone
from octavo.core.batching import BATCHING_MODES
from octavo.core.event_log import Reason
from octavo.core.preemption import PREEMPTION_MODES, VICTIM_POLICIES
from octavo.core.waiting_orders import WAITING_ORDERS
from octavo.messages import StepResult

TIERS = [(0, 0), (7, 0), (0, 7), (3, 4)]
lone = cache(lambda prompt, max_tokens: alone(list(prompt), max_tokens))


class Queue:
    """Who started when, against what each order promises of it."""

    def __init__(self, bed: CoreBed) -> None:
        self.bed = bed
        self.arrived_in: dict[int, int] = {}
        """By id, in order of arrival: after so many steps."""
        self.started: list[int] = []

    def step(self) -> None:
        assert self.bed.scheduler.journal.steps < 2000, "no end"
        for start in self.bed.step().starts:
            if start.request_id not in self.started:
                self.started.append(start.request_id)

    def check(self) -> None:
        """The bounds in the docstrings of the orders."""
        config, requests = self.bed.config, self.bed.requests
        assert max(r.num_passed_by for r in requests.values()) <= config.skip_limit
        if config.skip_limit:
            return  # on top of the order: each one at the head may be passed by so many
        place = {request_id: at for at, request_id in enumerate(self.started)}
        if config.scheduling_policy == "longest_prefix":
            late = [place[request_id] - at for at, request_id in enumerate(sorted(place))]
            assert max(late) <= config.overtake_limit
        ageing = config.priority_ageing_steps
        for first, second in combinations(self.arrived_in, 2):
            if not {first, second} <= place.keys() or place[first] < place[second]:
                continue  # in order, or one was aborted while it waited
            assert config.scheduling_policy != "fcfs", "overtaken"
            if config.scheduling_policy == "priority":
                better = requests[first].priority - requests[second].priority
                assert better > 0, "overtaken by no better priority"
                later = self.arrived_in[second] - self.arrived_in[first]
                assert not ageing or later < better * ageing, "overtaken for too long"


def live(rng: random.Random, **settings: object) -> CoreBed:
    """One life: 7 requests, 8 disturbances, then the end; answers are those of lone twins."""
    chunked = rng.random() < 0.8
    bed = CoreBed(
        num_blocks=rng.randrange(6, 10),
        max_num_batched_tokens=rng.randrange(4, 20) if chunked else 20,
        max_num_seqs=rng.randrange(2, 5),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.7,
        skip_limit=rng.choice((0, 2)),
        priority_ageing_steps=rng.choice((0, 3)),
        overtake_limit=rng.choice((0, 3)),
        swap_threshold=8,
        **settings,
    )
    prompts: dict[int, tuple[int, ...]] = {}
    aborted: set[int] = set()
    queue = Queue(bed)

    def add() -> None:
        stem = rng.randrange(3)
        tail = [rng.randrange(2) for _ in range(rng.randrange(1, 5))]
        prompt = (*range(stem * 100, stem * 100 + rng.randrange(13)), *tail)
        leader = None
        more = {"scope": rng.choice(("", "", "x")), "priority": rng.randrange(3)}
        for _ in range(rng.choice((1, 1, 2, 3))):
            added = bed.add(prompt, rng.randrange(1, 9), tenant=str(stem), leader=leader, **more)
            prompts[added] = prompt
            queue.arrived_in[added] = bed.scheduler.journal.steps
            leader = added if leader is None else leader

    def disturb() -> None:
        running, everybody = sorted(bed.scheduler.running), sorted(bed.scheduler.requests)
        match rng.randrange(4):
            case 0 if everybody:
                aborted.add(one := rng.choice(everybody))
                bed.scheduler.finish(one, "abort")
            case 1 if running:
                bed.scheduler.preempt(rng.choice(running))
            case 2:
                kv = bed.scheduler.kv
                kv.pool.release(kv.cache.evict(3, kv._save if kv.slots.num_blocks else None))
                kv._release_dropped()
            case _:
                us = [rng.choice((1.0, 100.0, 10_000.0)) for _ in range(5)]
                bed.set_rates(us_per_token=us[0], store=(us[1], us[2]), load=(us[3], us[4]))
        bed.scheduler.audit()

    for i in range(24):
        if i % 3 == 0 and i < 21:
            add()
        if i % 3 == 2:
            disturb()
        queue.step()
    while bed.scheduler.has_unfinished():
        queue.step()
    queue.check()
    for request_id, prompt in prompts.items():
        wanted = lone(prompt, bed.requests[request_id].max_tokens)
        output = bed.outputs[request_id]
        assert output == (wanted[: len(output)] if request_id in aborted else wanted)
    return bed


@pytest.mark.parametrize("means", sorted(PREEMPTION_MODES))
@pytest.mark.parametrize("policy", sorted(WAITING_ORDERS))
def test_every_combination_gives_the_undisturbed_answers(policy: str, means: str) -> None:
    """C14, C25: each victim x tier x mode under this order and these means: 60 lives."""
    seen: Counter[Reason] = Counter()
    for victim, tiers, mode in product(VICTIM_POLICIES, TIERS, BATCHING_MODES):
        rng = random.Random(f"{policy} {means} {victim} {tiers} {mode}")
        bed = live(
            rng,
            scheduling_policy=policy,
            preemption_mode=means,
            victim_policy=victim,
            num_slots=tiers,
            batching_mode=mode,
        )
        seen.update({reason: n for reason, n in bed.scheduler.event_log.counts.items() if n})
    common = {Reason.PREEMPTED, Reason.RESUMED, Reason.PREFIX_HIT, Reason.FORKED, Reason.ABORTED}
    tiers = {Reason.EVICTED, Reason.SAVED, Reason.LOADED, Reason.TIER_SLOW, Reason.DROPPED}
    assert seen.keys() >= common | tiers | {Reason.BATCHING_MODE, Reason.NO_BLOCKS}
    assert (Reason.SWAPPED in seen) == (means != "recompute")
    assert (Reason.ESTIMATED in seen) == (means == "auto")
    assert (Reason.TIERS_FULL in seen) == (means != "recompute")


@pytest.mark.parametrize("means", sorted(PREEMPTION_MODES))
@pytest.mark.parametrize("victim", sorted(VICTIM_POLICIES))
def test_overlapped_steps_with_random_aborts(victim: str, means: str) -> None:
    """C22: each plan is made before the result of the one before and carried out after it, in a
    pool of 6 blocks; anybody ends at any moment, waiting, running or in flight."""
    num_aborted_in_flight = 0
    for seed in range(6):
        rng = random.Random(f"{victim} {means} {seed}")
        bed = CoreBed(
            num_blocks=6,
            num_slots=(3, 3),
            preemption_mode=means,
            victim_policy=victim,
            swap_threshold=7,
            max_num_seqs=4,
            enable_prefix_caching=seed % 3 > 0,
            max_num_batched_tokens=rng.choice((5, 30)),
        )
        prompts = {}
        for i in range(12):
            prompt = tuple(range(100 * (i % 3), 100 * (i % 3) + 4 + i % 5))
            prompts[bed.add(prompt, 6 + i % 4)] = prompt
        aborted: set[int] = set()
        scheduler = bed.scheduler
        ahead = scheduler.schedule()
        for _ in range(2000):
            if not scheduler.has_unfinished() and not ahead.scheduled:
                break
            following = scheduler.schedule()
            scheduler.audit()
            if rng.random() < 0.15 and scheduler.requests:
                aborted.add(one := rng.choice(sorted(scheduler.requests)))
                num_aborted_in_flight += scheduler._in_flight(bed.requests[one])
                scheduler.finish(one, "abort")
                scheduler.audit()
            result: StepResult = bed.model.submit(ahead)
            bed.take(scheduler.update_from_output(ahead, result))
            scheduler.audit()
            ahead = following
        assert not scheduler.has_unfinished(), "no progress"
        for request_id, prompt in prompts.items():
            wanted, output = lone(prompt, 6 + request_id % 4), bed.outputs[request_id]
            assert output == (wanted[: len(output)] if request_id in aborted else wanted)
    assert num_aborted_in_flight > 2
