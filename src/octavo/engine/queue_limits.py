"""How much may wait: back-pressure at the door instead of a queue without end (C97)."""

from __future__ import annotations

import threading

from ..config import SchedulerConfig
from ..errors import QueueFull
from ..request import Request


class QueueLimits:
    """Counts what was let in and has not started yet, in requests and in prompt tokens.

    Any thread may enter; a prompt's n answers count as n. An empty queue takes any one prompt:
    what is larger than the limit itself is not told to come back later.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.max_num_reqs = config.max_num_queued_reqs
        self.max_num_tokens = config.max_num_queued_tokens
        self._num_tokens: dict[int, int] = {}
        """Prompt tokens by request id."""
        self._total = 0
        self._lock = threading.Lock()

    def enter(self, requests: list[Request]) -> None:
        """Count requests in, all or none. Raises QueueFull with both numbers."""
        num_tokens = sum(request.num_prompt_tokens for request in requests)
        with self._lock:
            count = len(self._num_tokens)
            if count and self.max_num_reqs and count + len(requests) > self.max_num_reqs:
                raise QueueFull(
                    f"{count} requests wait, the limit is {self.max_num_reqs}: try again later"
                )
            if count and self.max_num_tokens and self._total + num_tokens > self.max_num_tokens:
                raise QueueFull(
                    f"{self._total} prompt tokens wait, the limit is {self.max_num_tokens}, and "
                    f"this request has {num_tokens}: try again later"
                )
            for request in requests:
                self._num_tokens[request.request_id] = request.num_prompt_tokens
            self._total += num_tokens

    def leave(self, request_id: int) -> None:
        """A request started or ended; those that were never counted are ignored."""
        with self._lock:
            self._total -= self._num_tokens.pop(request_id, 0)
