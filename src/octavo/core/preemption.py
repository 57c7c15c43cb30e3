"""When blocks run out: who yields, and what becomes of its K/V. Small objects chosen by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..request import Request
from .kv_cache_manager import KVCacheManager


class VictimPolicy(Protocol):
    """Who yields its blocks when a running request needs one and there is none."""

    def choose(self, running: Iterable[Request]) -> Request:
        """One of `running`, which is not empty and holds the request in need as well.

        The request that arrived first must not be chosen while there is another: it is the one
        that is sure to make progress.
        """
        ...


class LastArrived:
    """`last_arrived`: who came last has lost least, and fcfs owes it least."""

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: request.request_id)


VICTIM_POLICIES: dict[str, type[VictimPolicy]] = {"last_arrived": LastArrived}


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
