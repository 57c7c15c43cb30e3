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

    def choose(self, running: Iterable[Request]) -> Request:
        """One of `running`, which is not empty and holds the request in need as well.

        By a total order that a preemption does not change: whoever is last in it is chosen only
        when alone, and is sure to make progress.
        """
        ...


class LastArrived:
    """`last_arrived`: who came last has lost least, and fcfs owes it least."""

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: request.request_id)


class LowestPriority:
    """`lowest_priority`: the worst priority (and, with ageing, youth), then who came last."""

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: (request.rank, request.request_id))


class MostGenerated:
    """`most_generated`: who had most of its answer already (R97); ties: who came last."""

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: (request.num_output_tokens, request.request_id))


class FewestGenerated:
    """`fewest_generated`: who has least to compute again for what it was given; ties: the last."""

    def choose(self, running: Iterable[Request]) -> Request:
        return min(running, key=lambda request: (request.num_output_tokens, -request.request_id))


VICTIM_POLICIES: dict[str, type[VictimPolicy]] = {
    "last_arrived": LastArrived,
    "lowest_priority": LowestPriority,
    "most_generated": MostGenerated,
    "fewest_generated": FewestGenerated,
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


class PreemptionMode(Protocol):
    """What happens to the K/V of a preempted request. Made from (settings, measured rates)."""

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        """Make all blocks of `request` available; it keeps its tokens."""
        ...


class Recompute:
    """`recompute`: dropped, and computed again from prompt and generated tokens (R96, R99).

    Full blocks stay in the prefix cache for as long as nobody needs the room; so much of the
    work may be found again.
    """

    def __init__(self, config: SchedulerConfig, rates: Rates) -> None:
        pass

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        kv.free(request)
        request.num_computed_tokens = 0


class Swap:
    """`swap`: moved to a tier below the pool; the request goes on where it was (R98).

    Where the tiers have no room it is recomputed.
    """

    def __init__(self, config: SchedulerConfig, rates: Rates) -> None:
        self._otherwise = Recompute(config, rates)
        self._threshold = config.swap_threshold
        self._rates = rates

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        is_there = request.num_computed_tokens > 0
        if not (is_there and self._is_worth_it(request, kv) and kv.swap_out(request)):
            self._otherwise.preempt(request, kv)
        request.num_computed_tokens = 0

    def _is_worth_it(self, request: Request, kv: KVCacheManager) -> bool:
        return True


class Threshold(Swap):
    """`threshold`: fewer computed tokens than `swap_threshold` are recomputed (R100)."""

    def _is_worth_it(self, request: Request, kv: KVCacheManager) -> bool:
        return request.num_computed_tokens >= self._threshold


class Auto(Swap):
    """`auto`: whichever is estimated to be quicker, from rates measured so far (R101, R102).

    What was never measured is tried.
    """

    def _is_worth_it(self, request: Request, kv: KVCacheManager) -> bool:
        num_blocks = kv.num_blocks_for(request.num_computed_tokens)
        num_kept = kv.slots.num_blocks - kv.slots.num_free
        swap = self._rates.swap_us(num_blocks, num_kept)
        recompute = self._rates.recompute_us(request.num_computed_tokens)
        costs = (-1 if us is None else us for us in (swap, recompute))
        kv.event_log.record(Reason.ESTIMATED, request.request_id, *costs)
        return swap is None or (recompute is not None and swap < recompute)


PREEMPTION_MODES: dict[str, type[Recompute] | type[Swap]] = {
    "recompute": Recompute,
    "swap": Swap,
    "threshold": Threshold,
    "auto": Auto,
}
