"""In which order waiting requests are admitted, and when: small objects chosen by name."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Protocol, TypeVar

from ..errors import ConfigError
from ..request import Request

Named = TypeVar("Named")


def by_name(setting: str, name: str, known: dict[str, Named]) -> Named:
    """The entry of a registry that a setting names; ConfigError lists the names there are."""
    if name not in known:
        raise ConfigError(setting, name, f"one of {', '.join(sorted(known))}")
    return known[name]


class WaitingOrder(Protocol):
    """The waiting queue. Every order is total: ties go by request_id (C8)."""

    def push(self, request: Request) -> None:
        """A new request joins."""
        ...

    def put_back(self, request: Request) -> None:
        """A preempted request returns: ahead of those that never ran (R96)."""
        ...

    def peek(self) -> Request:
        """Who is next; the queue is not empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted, or it was aborted."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """From next to last."""
        ...


class FirstComeFirstServed:
    """`fcfs`: by arrival, the preempted ones first and by arrival among themselves (R93)."""

    def __init__(self) -> None:
        self._returned: list[Request] = []
        self._arrived: OrderedDict[int, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._arrived[request.request_id] = request

    def put_back(self, request: Request) -> None:
        insort(self._returned, request, key=lambda other: other.request_id)

    def peek(self) -> Request:
        return self._returned[0] if self._returned else next(iter(self._arrived.values()))

    def remove(self, request: Request) -> None:
        if self._arrived.pop(request.request_id, None) is None:
            self._returned.remove(request)

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returned, self._arrived.values())


WAITING_ORDERS: dict[str, type[WaitingOrder]] = {"fcfs": FirstComeFirstServed}


class BatchingMode(Protocol):
    """When waiting requests may join those that run."""

    def may_join(self, num_running: int) -> bool:
        """Whether a request may be admitted beside `num_running` others of earlier steps."""
        ...


class ContinuousBatching:
    """`continuous`: in any step, as soon as there is room (R3, R19, R20)."""

    def may_join(self, num_running: int) -> bool:
        return True


BATCHING_MODES: dict[str, type[BatchingMode]] = {"continuous": ContinuousBatching}
