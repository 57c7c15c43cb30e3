"""When blocks run out: who yields, and what becomes of its K/V. Small objects chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ..request import Request
from .kv_cache_manager import KVCacheManager


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
    """What happens to the K/V of a preempted request."""

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        """Make all blocks of `request` available; it keeps its tokens."""
        ...


class Recompute:
    """`recompute`: dropped, and computed again from prompt and generated tokens (R96, R99).

    Full blocks stay in the prefix cache for as long as nobody needs the room; so much of the
    work may be found again.
    """

    def preempt(self, request: Request, kv: KVCacheManager) -> None:
        kv.free(request)
        request.num_computed_tokens = 0


PREEMPTION_MODES: dict[str, type[PreemptionMode]] = {"recompute": Recompute}
