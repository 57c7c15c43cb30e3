"""In which order waiting requests are admitted: small objects chosen by name.

`fcfs` and `priority` are here; `longest_prefix` and `fair_share` in files of their own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Protocol, TypeVar

from ..config import SchedulerConfig
from ..errors import ConfigError
from ..request import Request
from .kv_cache_manager import KVCacheManager

Named = TypeVar("Named")


def by_name(setting: str, name: str, known: dict[str, Named]) -> Named:
    """The entry of a registry that a setting names; ConfigError lists the names there are."""
    if name not in known:
        raise ConfigError(setting, name, f"one of {', '.join(sorted(known))}")
    return known[name]


class WaitingOrder(Protocol):
    """The waiting queue. Every order is total: ties go by request_id (C8)."""

    def __init__(self, config: SchedulerConfig) -> None: ...

    def push(self, request: Request, step: int) -> None:
        """A new request joins, after `step` steps."""
        ...

    def put_back(self, request: Request) -> None:
        """A preempted request returns: ahead of those that never ran (R96)."""
        ...

    def refresh(self, kv: KVCacheManager) -> None:
        """Somebody may be admitted now: bring what changes by itself up to date."""
        ...

    def peek(self) -> Request:
        """Who is next; the queue is not empty."""
        ...

    def admit(self, request: Request) -> None:
        """Take a request out as it starts; its status is still that of one who waits."""
        ...

    def remove(self, request: Request) -> None:
        """Take out a request that ended while it waited."""
        ...

    def ended(self, request: Request) -> None:
        """A running request is done."""
        ...

    def outranks(self, request: Request, other: Request) -> bool:
        """Whether `other` must yield to `request`, and never the other way round."""
        ...

    def weaker(self, request: Request, running: Iterable[Request]) -> list[Request]:
        """Those of `running` that `request` may preempt in order to be admitted."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """From next to last."""
        ...


class FirstComeFirstServed:
    """`fcfs`: by arrival, the preempted ones first and by arrival among themselves (R93)."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._returned: list[Request] = []
        self._arrived: OrderedDict[int, Request] = OrderedDict()

    def push(self, request: Request, step: int) -> None:
        self._arrived[request.request_id] = request

    def put_back(self, request: Request) -> None:
        insort(self._returned, request, key=lambda other: other.request_id)

    def refresh(self, kv: KVCacheManager) -> None:
        pass

    def peek(self) -> Request:
        return self._returned[0] if self._returned else next(iter(self._arrived.values()))

    def admit(self, request: Request) -> None:
        self.remove(request)

    def remove(self, request: Request) -> None:
        if self._arrived.pop(request.request_id, None) is None:
            self._returned.remove(request)

    def ended(self, request: Request) -> None:
        pass

    def outranks(self, request: Request, other: Request) -> bool:
        return False

    def weaker(self, request: Request, running: Iterable[Request]) -> list[Request]:
        return []

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returned, self._arrived.values())


class PriorityOrder(FirstComeFirstServed):
    """`priority`: the better priority first, then the preempted, then by arrival (R95, C8).

    With ageing a request gains one priority in every `priority_ageing_steps` steps since it
    came. All age alike, so its place is fixed at arrival: by priority x ageing steps + step of
    arrival. Bound: one of priority p is overtaken by one of a better priority q only if that came
    less than (p - q) x ageing steps after it. Without ageing (0) there is no bound, on purpose.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._sign = -1 if config.priority_order == "high_first" else 1
        self._ageing_steps = config.priority_ageing_steps
        self._entries: list[tuple[int, bool, int, Request]] = []
        """Sorted by (rank, never ran, request_id)."""

    def push(self, request: Request, step: int) -> None:
        request.rank = self._sign * request.priority
        if self._ageing_steps:
            request.rank = request.rank * self._ageing_steps + step
        insort(self._entries, (request.rank, True, request.request_id, request))

    def put_back(self, request: Request) -> None:
        insort(self._entries, (request.rank, False, request.request_id, request))

    def peek(self) -> Request:
        return self._entries[0][-1]

    def remove(self, request: Request) -> None:
        for never_ran in (False, True):
            at = bisect_left(self._entries, (request.rank, never_ran, request.request_id))
            if at < len(self._entries) and self._entries[at][-1] is request:
                del self._entries[at]
                return
        raise AssertionError(f"{request} does not wait")

    def outranks(self, request: Request, other: Request) -> bool:
        """By what was asked for, and by age: who waited for long enough is not sent back."""
        better = self._sign * (request.priority - other.priority) < 0
        return better and request.rank < other.rank

    def weaker(self, request: Request, running: Iterable[Request]) -> list[Request]:
        worse, rank, sign = self._sign * request.priority, request.rank, self._sign
        return [r for r in running if sign * r.priority > worse and r.rank > rank]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in self._entries)


class LongestPrefix(FirstComeFirstServed):
    """`longest_prefix`: who finds most of its prompt in the cache first (R107, R117).

    Bound: nobody leaves the queue more than `overtake_limit` places later than by arrival (C10).
    The n-th to arrive is due when n + overtake_limit others have left, and whoever is due goes
    first; dues grow with arrival, so only the oldest can be. The prefix cache is asked for the
    WINDOW oldest only, and only when somebody may be admitted after the tree or the queue has
    changed: a longer queue costs nothing more (C109).
    """

    WINDOW = 128

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._overtake_limit = config.overtake_limit
        self._due: dict[int, int] = {}
        """By id: how many may leave the queue before this request is due."""
        self._num_arrived = 0
        self._num_left = 0
        self._ranked: list[Request] = []
        self._ranked_at: tuple[int, int, int] | None = None

    def push(self, request: Request, step: int) -> None:
        super().push(request, step)
        self._due[request.request_id] = self._num_arrived + self._overtake_limit
        self._num_arrived += 1

    def refresh(self, kv: KVCacheManager) -> None:
        now = (kv.cache.version, self._num_arrived, self._num_left)
        if self._ranked_at != now:
            self._ranked_at = now
            window = list(islice(self._arrived.values(), self.WINDOW))
            lengths = {request: kv.num_hit_blocks(request) for request in window}
            self._ranked = sorted(window, key=lambda request: -lengths[request])

    def peek(self) -> Request:
        return next(iter(self))

    def remove(self, request: Request) -> None:
        super().remove(request)
        if self._due.pop(request.request_id, None) is not None:
            self._num_left += 1
            if request in self._ranked:
                self._ranked.remove(request)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        oldest = next(iter(self._arrived.values()), None)
        if oldest is not None and self._num_left >= self._due[oldest.request_id]:
            yield oldest
        else:
            oldest = None
        yield from (request for request in self._ranked if request is not oldest)
        ranked = set(self._ranked)
        for request in self._arrived.values():
            if request is not oldest and request not in ranked:
                yield request
