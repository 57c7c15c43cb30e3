"""An engine without a model: scripted answers behind the interface of AsyncLLM.

A thread of its own makes one event per answer and step, as the real one does, so that server tests
meet the same races: events come from another thread, aborts take effect between steps.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.checkpoint import GenerationDefaults
from octavo.config import EngineConfig
from octavo.errors import EngineDead, QueueFull, RequestError, RequestTooLarge
from octavo.outputs import SHUTTING_DOWN, Logprob, StreamEvent
from octavo.sampling_params import SamplingParams

SPECIALS = {256: "<|im_start|>", 257: "<|im_end|>", 258: "<s>"}
ALPHABET = ("a", "b", " ", "the ", "\n", '"', "\\", "é", "漢", "😀", "\u2028", "</script>")


class FakeTokenizer:
    """One token a byte, and three control tokens."""

    vocab_size = 259
    eos_token_id: int | None = 257

    def __init__(self, *, adds_bos: bool = False, chat_template: str | None = "chatml") -> None:
        self.bos_token_id: int | None = 258 if adds_bos else None
        self.chat_template: Any = chat_template

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        bos = [] if self.bos_token_id is None or not add_special_tokens else [self.bos_token_id]
        return bos + list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return SPECIALS[token_id].encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if i < 256 or not skip_special_tokens]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Any = None,
    ) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [256, *f"{message['role']}\n{message['content']}".encode(), 257, 10]
        if continue_final_message:
            return ids[:-2]
        return ids + ([256, *b"assistant\n"] if add_generation_prompt else [])


@dataclass(frozen=True)
class Piece:
    """One step of a script: what a StreamEvent says, as far as the script cares."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_hidden: int = 0
    """Tokens generated in this step, less those in token_ids: 1 for a stop id or a held token."""


Script = Callable[[list[int], SamplingParams, int], Iterator[Piece]]


def make_logprobs(token_id: int, count: int, rng: random.Random) -> Logprob:
    """A made-up entry with `count` alternatives, sometimes with the sampled token among them."""

    def entry(i: int, value: float, top: tuple[Logprob, ...] = ()) -> Logprob:
        data = SPECIALS[i].encode() if i in SPECIALS else bytes([i])
        return Logprob(i, data.decode("utf-8", "replace"), data, value, top=top)

    ids = [token_id, *(i for i in range(40, 127) if i != token_id)][: count + 1]
    if rng.random() < 0.5 and count:
        ids = ids[1:]
    values = sorted((-rng.random() * 9 for _ in ids), reverse=True)
    tops = tuple(entry(i, v) for i, v in zip(ids[:count], values, strict=False))
    own = dict(zip(ids, values, strict=True)).get(token_id, float("-inf"))
    return entry(token_id, own, tops)


def random_script(prompt: list[int], params: SamplingParams, index: int) -> Iterator[Piece]:
    """Text that depends on prompt, seed and index alone; ends at max_tokens, or before by EOS."""
    key = repr((prompt, params.seed, index)).encode()
    rng = random.Random(int.from_bytes(hashlib.sha256(key).digest()[:8], "big"))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    limit = params.max_tokens if params.max_tokens is not None else 64
    pending: list[int] = []
    held: list[int] = []
    if limit == 0:
        yield Piece(finish_reason="length")
    for count in range(1, limit + 1):
        if not params.ignore_eos and count > params.min_tokens and rng.random() < 0.02:
            yield _with_logprobs(decoder.decode(b"", True), held, params, rng, "stop")
            return
        if not pending:
            pending = list(rng.choice(ALPHABET).encode())
        held.append(pending.pop(0))
        last = count == limit
        text = decoder.decode(bytes([held[-1]]), last)
        shown, held = (held, []) if text or last else ([], held)
        yield _with_logprobs(text, shown, params, rng, "length" if last else None)


def _with_logprobs(
    text: str,
    ids: list[int],
    params: SamplingParams,
    rng: random.Random,
    finish_reason: str | None,
) -> Piece:
    """One step generates one token, whether it is shown now, later or never."""
    count = params.logprobs
    logprobs = () if count is None else tuple(make_logprobs(i, count, rng) for i in ids)
    return Piece(text, tuple(ids), logprobs, finish_reason, num_hidden=1 - len(ids))


def scripted(*pieces: Piece) -> Script:
    """A script that says the same whatever was asked."""
    return lambda prompt, params, index: iter(pieces)


@dataclass
class FakeMetrics:
    num_running: int = 0
    num_waiting: int = 0
    num_aborted: int = 0
    num_errors: int = 0

    def render(self) -> bytes:
        return f"vllm:num_requests_running {self.num_running}\n".encode()


class FakeStream:
    """AnswerStream of one request; `abort` may be called from the event loop at any time."""

    def __init__(self, engine: FakeEngine, request_id: int, job: Running) -> None:
        self.request_id = request_id
        self.prompt_token_ids = job.prompt
        self.seed = job.params.seed if job.params.seed not in (None, -1) else 1000 + request_id
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._open = set(range(job.params.n))

    def post(self, events: list[StreamEvent]) -> None:
        def put() -> None:
            for event in events:
                self._queue.put_nowait(event)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(put)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> StreamEvent:
        if not self._open:
            raise StopAsyncIteration
        event = await self._queue.get()
        if event.finish_reason is not None:
            self._open.discard(event.index)
        return event

    def abort(self) -> None:
        self._engine.request_abort(self.request_id)


@dataclass
class Running:
    prompt: list[int]
    params: SamplingParams
    priority: int
    cache_scope: str
    scripts: dict[int, Iterator[Piece]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    num_cached: int = 0
    stream: FakeStream | None = None


class FakeEngine:
    """Steps while there is work; `hold` stops it between two steps, `release` lets it go on."""

    def __init__(
        self,
        script: Script = random_script,
        *,
        tokenizer: FakeTokenizer | None = None,
        max_model_len: int = 512,
        max_num_seqs: int = 64,
        max_queued: int = 1000,
        step_delay: float = 0.0,
        sampling: dict[str, float] | None = None,
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer or FakeTokenizer()
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_queued = max_queued
        self.tenants: list[str] = []
        self.step_delay = step_delay
        self.pool_tokens = 1 << 20
        self.model_name = "fake/model"
        self.generation = GenerationDefaults(eos_token_ids=(257,), sampling=sampling or {})
        self.config = EngineConfig()
        self.created = int(time.time())
        self.metrics = FakeMetrics()
        self.is_ready = True
        self.submitted: list[Running] = []
        self.aborted: list[int] = []
        self.num_steps = 0
        self.submit_error: Exception | None = None
        self._live: dict[int, Running] = {}
        self._to_abort: set[int] = set()
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._next_id = 0
        self._held = False
        self._ending = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        return min(self.max_model_len, self.pool_tokens) - num_prompt_tokens

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_scope: str = "",
        tenant: str = "",
    ) -> FakeStream:
        self.tenants.append(tenant)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if self._ending or not self.is_ready:
            raise EngineDead("the engine has ended")
        if self.submit_error is not None:
            raise self.submit_error
        self._check(ids, params)
        with self._wake:
            num_answers = sum(job.params.n for job in self._live.values())
            if num_answers + params.n > self.max_num_seqs + self.max_queued:
                raise QueueFull(f"{self.max_queued} requests are waiting: try again later")
            job = Running(ids, params, priority, cache_scope)
            key = (cache_scope, tuple(ids))
            job.num_cached = (len(ids) - 1) // 4 * 4 if key in self._seen else 0
            self._seen.add(key)
            job.scripts = {i: self.script(ids, params, i) for i in range(params.n)}
            job.counts = dict.fromkeys(range(params.n), 0)
            request_id, self._next_id = self._next_id, self._next_id + 1
            job.stream = FakeStream(self, request_id, job)
            self._live[request_id] = job
            self.submitted.append(job)
            self._wake.notify()
        return job.stream

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        size = self.tokenizer.vocab_size
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(ids) >= self.max_model_len:
            raise RequestTooLarge("prompt", len(ids), self.max_model_len)
        groups = {
            "prompt": ids,
            "logit_bias": [i for i, _ in params.logit_bias],
            "allowed_token_ids": params.allowed_token_ids or (),
            "stop_token_ids": params.stop_token_ids,
            "logprob_token_ids": params.logprob_token_ids,
        }
        for name, values in groups.items():
            if any(i >= size for i in values):
                raise RequestError(f"{name} has an id beyond the vocabulary", param=name)

    def request_abort(self, request_id: int) -> None:
        with self._wake:
            if request_id in self._live:
                self._to_abort.add(request_id)
                self._wake.notify()

    def hold(self) -> None:
        with self._wake:
            self._held = True

    def release(self) -> None:
        with self._wake:
            self._held = False
            self._wake.notify()

    def die(self) -> None:
        """An internal fault: every answer ends with an error, nothing is taken any more."""
        with self._wake:
            self.is_ready = False
            self._end_all("error", "the engine stopped on an internal fault")

    def shutdown(self, timeout: float | None = None) -> None:
        self._ending = True
        until = None if timeout is None else time.monotonic() + timeout
        while self._live and (until is None or time.monotonic() < until):
            time.sleep(0.005)
        with self._wake:
            self._end_all("error", SHUTTING_DOWN)
            self._wake.notify()
        self._thread.join()

    def _end_all(self, reason: str, text: str) -> None:
        for request_id in list(self._live):
            self._end(request_id, reason, text)

    def _end(self, request_id: int, reason: str, text: str | None = None) -> None:
        job = self._live.pop(request_id)
        assert job.stream is not None
        job.stream.post(
            [
                StreamEvent(
                    request_id,
                    index,
                    "",
                    (),
                    finish_reason=reason,
                    error=text,
                    num_generated_tokens=job.counts[index],
                )
                for index in job.scripts
            ]
        )

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._to_abort and (self._held or not self._live):
                    if self._ending and not self._live:
                        return
                    self._wake.wait(0.05 if self._ending else None)
                for request_id in self._to_abort & self._live.keys():
                    self._end(request_id, "abort")
                    self.aborted.append(request_id)
                    self.metrics.num_aborted += 1
                self._to_abort.clear()
                if not self._held:
                    self._step()
                self.metrics.num_running = min(len(self._live), self.max_num_seqs)
                self.metrics.num_waiting = len(self._live) - self.metrics.num_running
            time.sleep(self.step_delay)

    def _step(self) -> None:
        self.num_steps += 1
        for request_id in list(self._live)[: self.max_num_seqs]:
            job = self._live[request_id]
            events = [self._advance(request_id, job, index) for index in list(job.scripts)]
            if not job.scripts:
                del self._live[request_id]
            assert job.stream is not None
            job.stream.post(events)

    def _advance(self, request_id: int, job: Running, index: int) -> StreamEvent:
        piece = next(job.scripts[index], Piece(finish_reason="stop"))
        job.counts[index] += len(piece.token_ids) + piece.num_hidden
        reason = "error" if piece.error is not None else piece.finish_reason
        if reason is not None:
            del job.scripts[index]
        if reason == "error":
            self.metrics.num_errors += 1
        scores = None
        is_done = reason != "timeout" or job.counts[index]  # or the prompt was not computed
        if job.params.prompt_logprobs is not None and is_done and index not in job.scored:
            job.scored.add(index)
            rng, num_top = random.Random(len(job.prompt)), job.params.prompt_logprobs
            rest = (make_logprobs(i, num_top, rng) for i in job.prompt[1:])
            scores = (None, *rest)
        return StreamEvent(
            request_id,
            index,
            piece.text,
            piece.token_ids,
            piece.logprobs,
            reason,
            piece.stop_reason,
            piece.error,
            job.counts[index],
            job.num_cached,
            scores,
        )
