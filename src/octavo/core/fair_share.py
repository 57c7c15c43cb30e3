"""`fair_share`: the tenant that got least goes first, by a virtual token counter for each tenant.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Bound: between two
tenants that both wait all the time, service differs by at most twice the larger of the dearest
prompt and the dearest batch (PROMPT_COST x its tokens; TOKEN_COST x the tokens that running
requests may generate), however many requests either of them sends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

from ..config import SchedulerConfig
from ..request import Request, Status
from .kv_cache_manager import KVCacheManager
from .policy import FirstComeFirstServed

PROMPT_COST = 1
TOKEN_COST = 2
"""Of a generated token, which takes a step of its own."""


class FairShare(FirstComeFirstServed):
    """Between tenants by counter, inside a tenant by arrival; the preempted come first.

    A prompt is charged when it starts, generated tokens when the next request may be admitted. A
    tenant that comes (back) starts at the least counter of those that wait: idleness earns nothing.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.counters: dict[str, int] = {}
        """Of tenants that wait or run, and of those that are ahead of everybody waiting."""
        self._queues: dict[str, OrderedDict[int, Request]] = {}
        self._num_live: dict[str, int] = {}
        self._num_charged: dict[Request, int] = {}
        """Generated tokens paid for, of those that run."""
        self._floor = 0
        """Counter of the tenant last served: nobody that waits is below."""
        self._last_to_wait: str | None = None
        self._heap: list[tuple[int, int, str]] = []
        """(counter, first request, tenant): counters only grow, so old entries come up early."""

    def push(self, request: Request, step: int) -> None:
        super().push(request, step)
        tenant = request.tenant
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1
        if tenant not in self._queues:
            if not self._queues and self._last_to_wait in self.counters:
                self._floor = max(self._floor, self.counters[self._last_to_wait])
            self._queues[tenant] = OrderedDict()
            self.counters[tenant] = max(self.counters.get(tenant, 0), self._floor)
            heappush(self._heap, (self.counters[tenant], request.request_id, tenant))
            if len(self._heap) > 64 + 2 * len(self._queues):  # mostly of tenants that left
                self._heap = sorted({entry[-1]: entry for entry in self._heap}.values())
        self._queues[tenant][request.request_id] = request

    def put_back(self, request: Request) -> None:
        super().put_back(request)
        self._settle(request)
        del self._num_charged[request]

    def refresh(self, kv: KVCacheManager) -> None:
        for request in self._num_charged:
            self._settle(request)

    def peek(self) -> Request:
        if self._returned:
            return self._returned[0]
        while True:
            entry = self._heap[0]
            tenant = entry[-1]
            queue = self._queues.get(tenant)
            if queue is None:
                heappop(self._heap)
                continue
            first = next(iter(queue.values()))
            now = (self.counters[tenant], first.request_id, tenant)
            if entry == now:
                return first
            heapreplace(self._heap, now)

    def admit(self, request: Request) -> None:
        first_time = request.status is Status.WAITING
        self._leave_queue(request)
        self._num_charged[request] = request.num_output_tokens
        if first_time:
            self._floor = max(self._floor, self.counters[request.tenant])
            self.counters[request.tenant] += PROMPT_COST * request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        self._leave_queue(request)
        self._forget(request.tenant)

    def ended(self, request: Request) -> None:
        self._settle(request)
        del self._num_charged[request]
        self._forget(request.tenant)

    def _settle(self, request: Request) -> None:
        num_output = request.num_output_tokens
        num_new = num_output - self._num_charged[request]
        self._num_charged[request] = num_output
        self.counters[request.tenant] += TOKEN_COST * num_new

    def _leave_queue(self, request: Request) -> None:
        super().remove(request)
        queue = self._queues.get(request.tenant)
        if queue and queue.pop(request.request_id, None) is not None and not queue:
            del self._queues[request.tenant]
            self._last_to_wait = request.tenant

    def _forget(self, tenant: str) -> None:
        """One request less; tenants that would start at the floor anyway need no counter."""
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]
        if len(self.counters) > 64 + 2 * len(self._num_live):
            self.counters = {
                name: count
                for name, count in self.counters.items()
                if name in self._num_live or count > self._floor
            }

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        for queue in sorted(self._queues.items(), key=self._place):
            yield from queue[1].values()

    def _place(self, queue: tuple[str, OrderedDict[int, Request]]) -> tuple[int, int]:
        """As peek() has it: whoever got least, then whose first came first."""
        return self.counters[queue[0]], next(iter(queue[1]))
