"""Who of those that wait may start in this step, and why the others may not."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice
from typing import TYPE_CHECKING

from ..request import Request
from .event_log import Reason
from .preemption import choose_victims

if TYPE_CHECKING:
    from .scheduler import Draft, Scheduler


class Admission:
    """The part of `schedule()` that comes after the running requests (R103)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def admit(self, draft: Draft, busy: Container[Request]) -> None:
        """Start waiting requests in order; the first that can't join ends it (R104), but that
        skip_limit of those behind it may pass one that does not fit."""
        scheduler = self._scheduler
        num_running = len(scheduler.running)
        is_open = not draft.preempted and draft.budget and scheduler.batching.may_join(num_running)
        if is_open and scheduler.free_rows and scheduler.waiting:
            scheduler.waiting.refresh(scheduler.kv)
        while scheduler.waiting:
            head = scheduler.waiting.peek()
            if self.join(head, draft, busy, num_running=num_running):
                continue
            if scheduler.journal.waiting_for[head.request_id] is not Reason.NO_BLOCKS:
                return
            num_left = scheduler.config.skip_limit - head.num_passed_by
            for other in list(islice(scheduler.waiting, 1, max(1, 1 + num_left))):
                if self.join(other, draft, busy, num_running=num_running):
                    head.num_passed_by += 1
                    scheduler.event_log.record(Reason.PASSED_BY, head.request_id, other.request_id)
                    break
            else:
                return

    def join(
        self, request: Request, draft: Draft, busy: Container[Request], *, num_running: int
    ) -> bool:
        """Start a waiting request if it can run in this step; else log why not."""
        scheduler = self._scheduler
        hold = scheduler.journal.hold
        if draft.preempted:
            return hold(request, Reason.PREEMPTION_STEP)
        if not scheduler.batching.may_join(num_running):
            return hold(request, Reason.BATCHING_MODE, num_running)
        weaker = scheduler.waiting.weaker(request, scheduler.running.values())
        if not scheduler.free_rows and not weaker:
            return hold(request, Reason.SEQS_FULL, len(scheduler.running))
        if draft.budget == 0:
            return hold(request, Reason.TOKEN_BUDGET, request.num_tokens, 0)
        match = scheduler.kv.find_prefix(request)
        num_hit_blocks = 0 if match is None else len(match.block_ids)
        num_wanted = request.num_tokens - num_hit_blocks * scheduler.kv.block_size
        num_new = self._cut_prompt(num_wanted, draft.budget)
        if num_new == 0:
            return hold(request, Reason.TOKEN_BUDGET, num_wanted, draft.budget)
        # All that it knows must fit, not only its first chunk, beside what others will ask
        # for: so nobody waits holding blocks (C2), nobody comes only to be sent away (C13).
        num_missing = scheduler.kv.num_blocks_for(request.num_tokens) - num_hit_blocks
        num_left = scheduler.kv.num_available - draft.num_blocks_owed
        num_left -= 0 if match is None else match.num_evictable
        if num_missing <= num_left and scheduler.free_rows:
            scheduler.start(request, match, num_new, draft)
            return True

        def suffices(victims: list[Request]) -> bool:
            num_yielded = scheduler.kv.num_yielded(victims, match)
            return num_missing <= num_left + num_yielded and bool(scheduler.free_rows or victims)

        weaker = [victim for victim in weaker if victim not in busy]
        victims = choose_victims(weaker, scheduler.victims, suffices) if weaker else []
        for victim in victims:  # they yield to this one, which starts; nobody else does (R105)
            scheduler.give_way(victim, request, draft)
        if victims:
            draft.preempted = False
            started = self.join(request, draft, busy, num_running=num_running)
            draft.preempted = True
            return started
        return hold(request, Reason.NO_BLOCKS, num_missing, num_left)

    def _cut_prompt(self, num_wanted: int, budget: int) -> int:
        """Tokens of a waiting request that join this step; 0: wait for one with more room."""
        config = self._scheduler.config
        if num_wanted <= budget or config.enable_chunked_prefill:
            return min(num_wanted, budget)
        # Whole prompts only. But a preempted request that has outgrown every step is cut, since
        # it would wait for ever; prompts that long are refused at the door.
        return budget if num_wanted > config.token_budget else 0
