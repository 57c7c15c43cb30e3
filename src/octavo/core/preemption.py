"""When blocks run out: who yields, and what becomes of its K/V. Small objects chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ..config import SchedulerConfig
from ..request import Request
from .event_log import Reason
from .kv_cache_manager import KVCacheManager
from .rates import Rates


class VictimPolicy(Protocol):
    """Who yields its blocks when a running request needs one and there is none."""

    def __init__(self, cost: Callable[[Request], int]) -> None:
        """`cost`: estimated microseconds to bring a request back, if it yielded now."""
        ...

    def choose(self, running: Iterable[Request]) -> Request:
        """One of `running`, which is not empty and holds the request in need as well.

        By a total order that a preemption does not change: whoever is last in it is chosen only
        when alone, and is sure to make progress.
        """
        ...


class LastArrived:
    """`last_arrived`: who came last has lost least, and fcfs owes it least."""

    def __init__(self, cost: Callable[[Request], int]) -> None:
        self._cost = cost

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: request.request_id)


class LowestPriority(LastArrived):
    """`lowest_priority`: the worst priority (and, with ageing, youth), then who came last."""

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: (request.rank, request.request_id))


class MostGenerated(LastArrived):
    """`most_generated`: who had most of its answer already (R97); ties: who came last."""

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: (request.num_output_tokens, request.request_id))


class FewestGenerated(LastArrived):
    """`fewest_generated`: who has least to compute again for what it was given; ties: the last."""

    def choose(self, running: Iterable[Request]) -> Request:
        return min(running, key=lambda request: (request.num_output_tokens, -request.request_id))


class Cheapest(LastArrived):
    """`cheapest`: who is back soonest, by the tokens that it would compute again or the bytes that
    would be swapped, whichever its means are, at the rates measured here; ties: who came last."""

    def choose(self, running: Iterable[Request]) -> Request:
        return min(running, key=lambda request: (self._cost(request), -request.request_id))


VICTIM_POLICIES: dict[str, type[VictimPolicy]] = {
    "last_arrived": LastArrived,
    "lowest_priority": LowestPriority,
    "most_generated": MostGenerated,
    "fewest_generated": FewestGenerated,
    "cheapest": Cheapest,
}


def choose_victims(
    candidates: list[Request], policy: VictimPolicy, suffices: Callable[[list[Request]], bool]
) -> list[Request]:
    """As few of `candidates` as suffice, in the order of `policy`; none if all do not."""
    victims: list[Request] = []
    if not suffices(candidates):
        return victims
    left = list(candidates)
    while not suffices(victims):
        victims.append(policy.choose(left))
        left.remove(victims[-1])
    return victims


class Recompute:
    """`recompute`: dropped, and computed again from prompt and generated tokens (R96, R99).

    Full blocks stay in the prefix cache for as long as nobody needs the room; so much of the
    work may be found again.
    """

    def __init__(self, config: SchedulerConfig, rates: Rates) -> None:
        self._threshold = config.swap_threshold
        self._rates = rates

    def cost(self, request: Request, kv: KVCacheManager) -> int:
        """Estimated microseconds to bring `request` back, if it were preempted now."""
        num_lost = request.num_computed_tokens - kv.num_shared_tokens(request)
        return self._rates.recompute_us(num_lost)

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        """Make all blocks of `request` available; it keeps its tokens."""
        kv.free(request)
        request.num_computed_tokens = 0


class Swap(Recompute):
    """`swap`: moved to a tier below the pool; the request goes on where it was (R98).

    Where the tiers have no room it is recomputed.
    """

    def cost(self, request: Request, kv: KVCacheManager) -> int:
        fits = kv.num_blocks_for(request.num_computed_tokens) <= kv.num_slots_left
        swaps = fits and self._is_worth_it(request, kv)
        return self._swap_us(request, kv) if swaps else super().cost(request, kv)

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        is_there = request.num_computed_tokens > 0
        if not (is_there and self._is_worth_it(request, kv) and kv.swap_out(request)):
            super().preempt(request, kv)
        request.num_computed_tokens = 0

    def _swap_us(self, request: Request, kv: KVCacheManager) -> int:
        num_kept = kv.slots.num_blocks - kv.slots.num_free
        return self._rates.swap_us(kv.num_blocks_for(request.num_computed_tokens), num_kept)

    def _is_worth_it(self, request: Request, kv: KVCacheManager) -> bool:
        return True


class Threshold(Swap):
    """`threshold`: fewer computed tokens than `swap_threshold` are recomputed (R100)."""

    def _is_worth_it(self, request: Request, kv: KVCacheManager) -> bool:
        return request.num_computed_tokens >= self._threshold


class Auto(Swap):
    """`auto`: whichever is estimated to be quicker, at the rates measured so far (R101, R102)."""

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        swap, recompute = self._swap_us(request, kv), Recompute.cost(self, request, kv)
        kv.event_log.record(Reason.ESTIMATED, request.request_id, swap, recompute)
        super().preempt(request, kv)

    def _is_worth_it(self, request: Request, kv: KVCacheManager) -> bool:
        return self._swap_us(request, kv) < Recompute.cost(self, request, kv)


PREEMPTION_MODES: dict[str, type[Recompute]] = {
    "recompute": Recompute,
    "swap": Swap,
    "threshold": Threshold,
    "auto": Auto,
}
