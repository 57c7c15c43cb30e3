"""The engine in a thread of its own, for asyncio: submit a prompt, iterate over its stream.

The engine thread owns all state. Callers check their request on their own thread (a bad one is
refused at once), then hand it over through a queue; events come back in one call per event loop
and step. Without requests the thread sleeps on the queue.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from ..checkpoint import GenerationDefaults
from ..config import make_config
from ..core.event_log import Reason
from ..errors import EngineDead, RequestError
from ..outputs import SHUTTING_DOWN, StreamEvent
from ..request import Request
from ..sampling_params import SamplingParams
from .build import Engine, build_engine
from .grammar import COMPILE_SECONDS
from .metrics import Metrics
from .tokenizer import Tokenizer

logger = logging.getLogger("octavo")

IDLE_AUDIT_SECONDS = 1.0
"""Without work for so long, the engine recounts its blocks once, keeps prefixes, then sleeps."""

Command = Callable[[], list[StreamEvent]]


class AnswerStream:
    """Events of the n answers to one prompt, as they come; ends when each has a finish_reason.

    Belongs to the event loop that submitted it. Leaving it unread costs memory only until it ends;
    call abort() when nobody will read on.
    """

    def __init__(self, engine: AsyncLLM, requests: list[Request]) -> None:
        self.request_id = requests[0].request_id
        self.prompt_token_ids = requests[0].token_ids[: requests[0].num_prompt_tokens]
        self.seed = requests[0].seed
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._request_ids = [request.request_id for request in requests]
        self._events: deque[StreamEvent] = deque()
        self._news = asyncio.Event()
        self._num_open = len(requests)

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._events:
            if not self._num_open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        event = self._events.popleft()
        self._num_open -= event.finish_reason is not None
        return event

    def abort(self) -> None:
        """End what still runs of this request; its blocks are free before the next step."""
        self._engine.abort(self._request_ids)

    def put(self, event: StreamEvent) -> None:
        """Deliver one event; called on the stream's own loop."""
        self._events.append(event)
        self._news.set()


class Pending(NamedTuple):
    """A request whose grammar is being compiled."""

    stream: AnswerStream
    requests: list[Request]
    compiled: Future[Any]


class AsyncLLM:
    """A loaded model and the thread that steps it. Construct it off the event loop: loading blocks.

    Takes every setting of octavo.config as a keyword and refuses what it does not know.
    """

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        self.config = make_config(model=model, **settings)
        self._engine: Engine = build_engine(self.config)
        self.created = int(time.time())
        self._next_request_id = 0
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[int, AnswerStream] = {}
        """By request id; owned by the engine thread."""
        self._open: dict[int, set[int]] = {}
        """Indexes of each of them that have not ended."""
        self._compiling: dict[int, Pending] = {}
        """Those of them whose grammar is being compiled."""
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="octavo-grammar")
        self._accepting = True
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens, prompt and output together."""
        return self._engine.max_model_len

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Output tokens that model length and KV pool leave to such a prompt; below 1: none."""
        return self._engine.inputs.limits.max_output_tokens(num_prompt_tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def generation(self) -> GenerationDefaults:
        """The model's own defaults, which a request overrides."""
        return self._engine.generation

    @property
    def metrics(self) -> Metrics:
        return self._engine.metrics

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted: neither shutting down nor dead."""
        return self._accepting and self._dead is None

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_scope: str = "",
        tenant: str = "",
    ) -> AnswerStream:
        """Queue one prompt, from a coroutine; its n answers come interleaved in one stream.

        A grammar is compiled by another thread; if it is bad, the answers end with finish_reason
        "error" and `refused`. Raises RequestError for what can never run, QueueFull where too much
        waits already, and EngineDead after a shutdown or a crash.
        """
        self._check_alive()
        inputs = self._engine.inputs
        token_ids = inputs.tokenize(prompt)
        with self._lock:
            # Under the lock, so that requests arrive in the order of their numbers, and none slips
            # in behind the engine's last look. One that is refused here takes no number.
            self._check_alive()
            requests = inputs.requests(
                token_ids,
                params,
                request_id=self._next_request_id,
                arrival_time=self._engine.core.now(),
                priority=priority,
                cache_scope=cache_scope,
                tenant=tenant,
            )
            stream = AnswerStream(self, requests)
            self._engine.core.queue.enter(requests)
            self._next_request_id += params.n
            grammar = params.grammar
            if grammar is None or self._engine.core.grammars.is_compiled(grammar):
                self._commands.put(lambda: self._add(stream, requests))
            else:
                compiled = self._compilers.submit(self._engine.core.grammars.compile, grammar)
                self._commands.put(lambda: self._hold(stream, requests, compiled))
                stream.loop.call_later(COMPILE_SECONDS, self._expire, stream.request_id)
        return stream

    def abort(self, request_ids: list[int]) -> None:
        """End requests, from any thread; those that have ended are ignored."""
        self._commands.put(lambda: self._abort(request_ids))

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop accepting, let running answers finish for `timeout` seconds (None: as long as they
        take), then end the rest with an error event. Blocks; the engine can't be used afterwards.
        """
        with self._lock:
            self._accepting = False
        self._commands.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._commands.put(lambda: self._end_all(SHUTTING_DOWN))
            self._thread.join()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._engine.core.close(healthy=self._dead is None)

    def _expire(self, request_id: int) -> None:
        message = f"the grammar is too complex: it took longer than {COMPILE_SECONDS:g} s"
        self._commands.put(lambda: self._drop(request_id, error=message, refused=True))

    def _check_crash(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    def _check_alive(self) -> None:
        self._check_crash()
        if not self._accepting:
            raise EngineDead("the engine is shutting down and takes no new requests")

    # Below this line everything runs on the engine thread.

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as fault:
            logger.exception("the engine stopped")
            message = f"the engine stopped on an internal error ({type(fault).__name__})"
            with self._lock:
                self._dead = message
            while not self._commands.empty():
                if (command := self._commands.get()) is not None:
                    with suppress(Exception):  # an add ends its stream; the rest has no meaning now
                        self._deliver(command())
            self._deliver(self._give_up(message))

    def _loop(self) -> None:
        """Take commands, step, deliver; return once told to stop and nothing is left."""
        core = self._engine.core
        stopping = False
        while not stopping or core.has_unfinished() or self._compiling:
            wait = not core.has_unfinished()
            while wait or not self._commands.empty():
                command = self._next_command() if wait else self._commands.get()
                wait = False
                if command is None:
                    stopping = True
                else:
                    self._deliver(command())
            self._deliver(core.step())

    def _next_command(self) -> Command | None:
        """Sleep until there is one. Raises AssertionError if the idle scheduler does not add up:
        then answers could be wrong, and the engine rather stops."""
        try:
            return self._commands.get(timeout=IDLE_AUDIT_SECONDS)
        except queue.Empty:
            self._engine.core.scheduler.audit()
            self._compilers.submit(self._engine.core.grammars.warm_up)
        keep, go_on = self._engine.core.prefixes.keep, self._commands.empty
        while (seconds := keep(go_on=go_on)) is not None:
            with suppress(queue.Empty):
                return self._commands.get(timeout=seconds)
        return self._commands.get()

    def _add(self, stream: AnswerStream, requests: list[Request]) -> list[StreamEvent]:
        self._streams[stream.request_id] = stream
        self._open[stream.request_id] = set(range(len(requests)))
        try:
            self._check_crash()
            self._engine.core.add(requests)
        except Exception as fault:
            for request in requests:
                self._engine.core.queue.leave(request.request_id)
            refused = isinstance(fault, RequestError)
            indexes = range(len(requests))
            return _ended(stream.request_id, indexes, error=str(fault), refused=refused)
        return []

    def _hold(
        self, stream: AnswerStream, requests: list[Request], compiled: Future[Any]
    ) -> list[StreamEvent]:
        """Keep a request until its grammar is compiled; others go on meanwhile."""
        request_id = stream.request_id
        self._streams[request_id] = stream
        self._open[request_id] = set(range(len(requests)))
        self._compiling[request_id] = Pending(stream, requests, compiled)
        if self._dead is not None:
            return self._drop(request_id, error=self._dead)
        event_log = self._engine.core.scheduler.event_log
        event_log.record(Reason.GRAMMAR_PENDING, request_id)
        compiled.add_done_callback(lambda _: self._commands.put(lambda: self._release(request_id)))
        return []

    def _release(self, request_id: int) -> list[StreamEvent]:
        """The grammar is there, or was found to be none."""
        pending = self._compiling.get(request_id)
        if pending is None or pending.compiled.cancelled():
            return []
        fault = pending.compiled.exception()
        if isinstance(fault, RequestError):
            return self._drop(request_id, error=str(fault), refused=True)
        del self._compiling[request_id]
        return self._add(pending.stream, pending.requests)

    def _drop(self, request_id: int, **end: Any) -> list[StreamEvent]:
        """End a request whose grammar is not compiled; nothing happens to any other."""
        pending = self._compiling.pop(request_id, None)
        if pending is None:
            return []
        pending.compiled.cancel()
        for request in pending.requests:
            self._engine.core.queue.leave(request.request_id)
        return _ended(request_id, range(len(pending.requests)), **end)

    def _abort(self, request_ids: list[int]) -> list[StreamEvent]:
        events = [event for i in request_ids for event in self._drop(i, finish_reason="abort")]
        ended = (self._engine.core.end(request_id, "abort") for request_id in request_ids)
        return events + [event for event in ended if event is not None]

    def _end_all(self, message: str) -> list[StreamEvent]:
        core = self._engine.core
        dropped = [e for i in list(self._compiling) for e in self._drop(i, error=message)]
        events = [core.end(number, "error", message) for number in list(core.outputs.answers)]
        return dropped + [event for event in events if event is not None]

    def _give_up(self, message: str) -> list[StreamEvent]:
        """The last events after a crash. Nothing of the core is asked: what broke may break again,
        and events of the step that broke were lost on their way."""
        return [
            event
            for request_id, indexes in self._open.items()
            for event in _ended(request_id, sorted(indexes), error=message)
        ]

    def _deliver(self, events: list[StreamEvent]) -> None:
        """Hand events to the loops of their streams: one wake-up per loop, not one per token."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[AnswerStream, StreamEvent]]] = {}
        for event in events:
            stream = self._streams[event.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, event))
            if event.finish_reason is not None:
                self._open[event.request_id].discard(event.index)
                if not self._open[event.request_id]:
                    del self._streams[event.request_id], self._open[event.request_id]
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, deliveries)
            except RuntimeError:  # The loop is closed: nobody reads these streams any more.
                for stream, _ in deliveries:
                    stream.abort()


def _ended(request_id: int, indexes: Iterable[int], **end: Any) -> list[StreamEvent]:
    """The last events of these answers, whose text was all sent; by an error unless `end`, fields
    of StreamEvent, says otherwise."""
    return [
        StreamEvent(request_id, i, "", (), **{"finish_reason": "error", **end}) for i in indexes
    ]


def _put_all(deliveries: list[tuple[AnswerStream, StreamEvent]]) -> None:
    for stream, event in deliveries:
        stream.put(event)
