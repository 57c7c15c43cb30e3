"""Random lives of a scheduler: whatever happens in whatever order, every invariant holds.

Under every combination of policy, victim, means, tier, batching mode and way of taking memory.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from beds.core_bed import CoreBed, alone
from octavo.core.batching import BATCHING_MODES
from octavo.core.event_log import Reason
from octavo.core.preemption import PREEMPTION_MODES, VICTIM_POLICIES
from octavo.core.waiting_orders import WAITING_ORDERS
from octavo.errors import RequestTooLarge

MAX_STEPS_TO_DRAIN = 3000


class SchedulerMachine(RuleBasedStateMachine):
    """Adds with shared prefixes, steps, aborts, faults, preemptions, evictions."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    @initialize(
        num_blocks=st.integers(4, 16),
        budget=st.integers(1, 20),
        max_num_seqs=st.integers(1, 5),
        chunked=st.booleans(),
        memory=st.sampled_from(["cached", "cached", "paged", "contiguous"]),
        policy=st.sampled_from(sorted(WAITING_ORDERS)),
        victim=st.sampled_from(["auto", *sorted(VICTIM_POLICIES)]),
        mode=st.sampled_from(["continuous", *sorted(BATCHING_MODES)]),
        priority_order=st.sampled_from(["low_first", "high_first"]),
        limits=st.tuples(*[st.sampled_from([0, 0, 1, 4])] * 3),
        means=st.sampled_from(sorted(PREEMPTION_MODES)),
        num_slots=st.tuples(st.integers(0, 8), st.integers(0, 6)),
    )
    def start(
        self,
        *,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        chunked: bool,
        memory: str,
        policy: str,
        victim: str,
        mode: str,
        priority_order: str,
        limits: tuple[int, int, int],
        means: str,
        num_slots: tuple[int, int],
    ) -> None:
        contiguous = self.contiguous = memory == "contiguous"
        self.bed = CoreBed(
            num_blocks=num_blocks,
            max_model_len=min(24, num_blocks * 4) if contiguous else 10_000,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=memory == "cached",
            kv_reservation="contiguous" if contiguous else "paged",
            scheduling_policy=policy,
            victim_policy=victim,
            batching_mode=mode,
            priority_order=priority_order,
            skip_limit=limits[0],
            priority_ageing_steps=limits[1],
            overtake_limit=limits[2],
            preemption_mode=means,
            swap_threshold=6,
            num_slots=(0, 0) if contiguous else num_slots,
        )
        self.scheduler = self.bed.scheduler

    @rule(
        stem=st.integers(0, 2),
        num_shared=st.integers(0, 17),
        tail=st.lists(st.integers(0, 1), max_size=4),
        max_tokens=st.integers(1, 16),
        num_copies=st.integers(1, 3),
        forked=st.booleans(),
        scope=st.sampled_from(["", "", "x"]),
        priority=st.integers(-1, 2),
    )
    def add(
        self,
        *,
        stem: int,
        num_shared: int,
        tail: list[int],
        max_tokens: int,
        num_copies: int,
        forked: bool,
        scope: str,
        priority: int,
    ) -> None:
        prompt = [*range(stem * 100, stem * 100 + num_shared), *tail] or [stem]
        room = self.scheduler.max_output_tokens(len(prompt))
        if self.contiguous:  # its max_model_len is short, and cuts an answer where the pool refuses
            max_tokens = min(max_tokens, max(1, room))
        refused = max_tokens > room
        if not self.scheduler.config.enable_chunked_prefill:
            refused = refused or len(prompt) > self.scheduler.config.token_budget
        leader: int | None = None
        for _ in range(num_copies):
            if refused:
                with pytest.raises(RequestTooLarge):
                    self.bed.add(prompt, max_tokens, scope=scope)
            else:
                request_id = self.bed.add(
                    prompt,
                    max_tokens,
                    scope=scope,
                    priority=priority,
                    tenant=str(stem),
                    leader=leader,
                )
                self.prompts[request_id] = prompt
                leader = request_id if forked and leader is None else leader

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.bed.step()

    def _pick(self, data: st.DataObject) -> int | None:
        live = sorted(self.scheduler.requests)
        return data.draw(st.sampled_from(live)) if live else None

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = self._pick(data)
        if request_id is not None:
            assert self.scheduler.finish(request_id, "abort")
            self.ended.add(request_id)

    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        """In the very step in which it may finish."""
        request_id = self._pick(data)
        if request_id is not None:
            self.bed.step(lambda: self.scheduler.finish(request_id, "abort"))
            self.ended.add(request_id)

    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        request_id = self._pick(data)
        if request_id is not None:
            self.bed.model.faults[request_id] = -1
            self.bed.step()

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = self._pick(data)
        if request_id is not None:
            self.scheduler.preempt(request_id)

    @rule(us=st.tuples(*[st.sampled_from([1.0, 100.0, 10_000.0])] * 5))
    def measure(self, us: tuple[float, float, float, float, float]) -> None:
        """Steps and transfers take what they take: moving is cheap, or computing, or neither."""
        self.bed.set_rates(us_per_token=us[0], store=us[1:3], load=us[3:])

    @rule(num_blocks=st.integers(1, 5))
    def evict(self, num_blocks: int) -> None:
        evicted = self.scheduler.kv.cache.evict(num_blocks)
        self.scheduler.kv.pool.release(evicted)
        self.scheduler.kv._release_dropped()
        for block_id in evicted:
            self.bed.model.poison(block_id)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "bed"):
            self.scheduler.audit()

    def teardown(self) -> None:
        if not hasattr(self, "bed"):
            return
        bed = self.bed
        bed.run(MAX_STEPS_TO_DRAIN)
        for request_id, prompt in self.prompts.items():
            request = bed.requests[request_id]
            expected = alone(prompt, request.max_tokens)
            if request_id in self.ended or request.finish_reason == "error":
                expected = expected[: len(bed.outputs[request_id])]
            assert bed.outputs[request_id] == expected
        stats = bed.scheduler.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=settings().max_examples // 2, stateful_step_count=40
)


def test_ten_thousand_random_operations() -> None:
    """C16: add (n = 2, twins, shared prefixes), step, abort, preempt, finish; 16 blocks, and a few
    below them.

    The audit runs after each; at the end the idle pool is whole.
    """
    rng = random.Random(16)
    bed = CoreBed(
        num_blocks=16,
        max_num_batched_tokens=12,
        max_num_seqs=6,
        preemption_mode="threshold",
        swap_threshold=12,
        num_slots=(3, 5),
    )
    scheduler = bed.scheduler
    prompts: dict[int, list[int]] = {}

    def abort_somebody() -> None:
        if scheduler.requests:
            scheduler.finish(rng.choice(sorted(scheduler.requests)), "abort")

    for _ in range(10_000):
        choice = rng.random()
        if choice < 0.16 and scheduler.num_waiting < 6:
            stem = rng.randrange(4) * 100
            prompt = [*range(stem, stem + rng.randrange(1, 24)), rng.randrange(3)]
            leader: int | None = None
            for _ in range(rng.randrange(1, 3)):
                request_id = bed.add(prompt, rng.randrange(1, 20), leader=leader)
                prompts[request_id] = prompt
                leader = rng.choice([None, request_id])
        elif choice < 0.20:
            abort_somebody()
            scheduler.audit()
        elif choice < 0.24:
            bed.step(abort_somebody)
        elif choice < 0.30 and scheduler.running:
            scheduler.preempt(rng.choice(sorted(scheduler.running)))
            scheduler.audit()
        else:
            bed.step()
    bed.run()
    finished = [i for i, event in bed.ends.items() if event.finish_reason == "length"]
    assert len(finished) > 300
    for request_id in rng.sample(finished, 100):
        expected = alone(prompts[request_id], bed.requests[request_id].max_tokens)
        assert bed.outputs[request_id] == expected
    stats = scheduler.stats()
    assert scheduler.event_log.counts[Reason.FORKED] > 100
    assert scheduler.event_log.counts[Reason.SWAPPED] > 100
    assert stats.num_preemptions > 100
    assert stats.prefix_hits_tokens > 1000
    assert stats.num_free_blocks + stats.num_cached_blocks == 16
