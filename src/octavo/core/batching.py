"""When requests join and leave the batch: small objects chosen by name."""

from __future__ import annotations

from typing import Protocol

from ..request import Request


class BatchingMode(Protocol):
    """When waiting requests may join those that run, and what becomes of a row that is done."""

    padding: dict[Request, None]
    """Finished requests that go on costing their row, their blocks and their compute."""

    def may_join(self, num_running: int) -> bool:
        """Whether a request may be admitted beside `num_running` others of earlier steps."""
        ...

    def keep(self, request: Request) -> bool:
        """Whether a request that has finished beside others stays as padding."""
        ...


class ContinuousBatching:
    """`continuous`: in any step, as soon as there is room (R3, R19, R20)."""

    def __init__(self) -> None:
        self.padding: dict[Request, None] = {}

    def may_join(self, num_running: int) -> bool:
        return True

    def keep(self, request: Request) -> bool:
        return False


class DroppedStaticBatching(ContinuousBatching):
    """`static_dropped`: starts together, ends together; finished rows cost only their slot."""

    def may_join(self, num_running: int) -> bool:
        return num_running == 0


class StaticBatching(DroppedStaticBatching):
    """`static`: the baseline of R12-R16. Finished rows are padding until the last one ends: their
    last computed position is computed again in every step. Nothing of that is sampled.
    """

    def keep(self, request: Request) -> bool:
        kept = request.finish_reason in ("stop", "length")
        if kept:
            self.padding[request] = None
        return kept


BATCHING_MODES: dict[str, type[BatchingMode]] = {
    "continuous": ContinuousBatching,
    "static": StaticBatching,
    "static_dropped": DroppedStaticBatching,
}
