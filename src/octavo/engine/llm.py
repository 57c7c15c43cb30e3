"""The engine in this thread: LLM.generate and LLM.chat, blocking, for scripts and notebooks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ..config import make_config
from ..core.stats import SchedulerStats
from ..errors import EngineDead, RequestError
from ..outputs import CompletionOutput, RequestOutput, StreamEvent
from ..request import Request
from ..sampling_params import SamplingParams
from .build import Engine, build_engine
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Any]

DEFAULT_MAX_TOKENS = 256
"""Output tokens of generate() and chat() without params, where the limits leave that many."""


class LLM:
    """A loaded model that answers many prompts at once. Calls from several threads take turns.

    LLM(model="smollm2-135m", max_num_batched_tokens=2048, ...) takes every setting of
    octavo.config as a keyword and refuses what it does not know (ConfigError).
    """

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        self.config = make_config(model=model, **settings)
        self._engine: Engine = build_engine(self.config, scraped=False)
        self._next_request_id = 0
        self._turns = threading.Lock()
        self._whose_turn: int | None = None
        """The thread that steps the engine now."""
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens, prompt and output together."""
        return self._engine.max_model_len

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Output tokens that model length and KV pool leave to such a prompt; below 1: none."""
        return self._engine.inputs.limits.max_output_tokens(num_prompt_tokens)

    @property
    def load_seconds(self) -> float:
        """How long the model took to load."""
        return self._engine.load_seconds

    def stats(self) -> SchedulerStats:
        """The scheduler's counts since the start."""
        return self._engine.core.scheduler.stats()

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults, over SamplingParams' own."""
        sampling: dict[str, Any] = dict(self._engine.generation.sampling)
        return SamplingParams(**sampling)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt: text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.

        `params` is one for all prompts, or one each; by default the model's own, and
        DEFAULT_MAX_TOKENS. All prompts are checked before any runs: RequestError then names what is
        wrong, and nothing was computed. An answer that a fault ended has finish_reason "error",
        and says why in `error`.
        """
        return self._run(_listed(prompts), params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the model's chat template writes the prompts."""
        prompts = [
            self.tokenizer.apply_chat_template(conversation, **template)
            for conversation in _conversations(messages)
        ]
        return self._run(prompts, params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Continue one prompt, piece by piece; leaving the loop early aborts the request.

        Raises RequestError while another stream of this LLM is open, and so do the other calls.
        """
        with self._turn():
            _, requests = self._prepare(prompt, params)
            core = self._engine.core
            core.add(requests)
            parent_id = requests[0].request_id
            try:
                while core.has_unfinished():
                    yield from (event for event in core.step() if event.request_id == parent_id)
            finally:
                self._abort(requests)

    def close(self) -> None:
        """Give back the model's memory and threads; the LLM can't be used afterwards.

        Raises RequestError while a stream of this thread is open; other threads' calls end first.
        """
        with suppress(EngineDead), self._turn():  # EngineDead: it is closed already
            self._closed = True
            self._engine.core.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time, since whoever steps the engine gets everybody's events.

        Other threads wait. A thread that has left a stream open would wait for itself, and is told.
        """
        if self._whose_turn == threading.get_ident():
            raise RequestError(
                "a stream of this LLM is still open: read it to its end or close() it first"
            )
        with self._turns:
            if self._closed:
                raise EngineDead("this LLM is closed: make a new one")
            self._whose_turn = threading.get_ident()
            try:
                yield
            finally:
                self._whose_turn = None

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None
    ) -> tuple[str | None, list[Request]]:
        """The text (if any) and the checked requests of one prompt."""
        given = _prompt_of(prompt)
        inputs = self._engine.inputs
        token_ids = inputs.tokenize(given)
        if params is None:
            # A limit that nobody asked for gives way to what the model and the pool leave.
            room = max(1, self.max_output_tokens(len(token_ids)))
            params = replace(self.default_params(), max_tokens=min(DEFAULT_MAX_TOKENS, room))
        if params.grammar is not None:
            self._engine.core.grammars.compile(params.grammar)
        requests = inputs.requests(
            token_ids,
            params,
            request_id=self._next_request_id,
            arrival_time=self._engine.core.now(),
        )
        self._next_request_id += params.n
        return (given if isinstance(given, str) else None), requests

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with self._turn():
            each = _one_each(params, len(prompts))
            prepared = [self._prepare(p, s) for p, s in zip(prompts, each, strict=True)]
            return self._answer(prepared, use_tqdm=use_tqdm)

    def _answer(
        self, prepared: list[tuple[str | None, list[Request]]], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        for text, requests in prepared:
            first = requests[0]
            answers = [CompletionOutput(index) for index in range(len(requests))]
            outputs[first.request_id] = RequestOutput(
                first.request_id, text, list(first.token_ids), answers, seed=first.seed
            )
        everything = [request for _, requests in prepared for request in requests]
        core = self._engine.core
        try:
            for _, requests in prepared:
                core.add(requests)
            with _progress(len(everything), enabled=use_tqdm) as bar:
                while core.has_unfinished():
                    for event in core.step():
                        outputs[event.request_id].add(event)
                        bar.update(int(event.finish_reason is not None))
        finally:
            self._abort(everything)
        return list(outputs.values())

    def _abort(self, requests: list[Request]) -> None:
        """End what still runs (an interrupt, an early exit); finished requests are unknown."""
        for request in requests:
            self._engine.core.end(request.request_id, "abort")


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * number
    if not isinstance(params, list | tuple) or not all(
        isinstance(each, SamplingParams) for each in params
    ):
        raise RequestError("params must be SamplingParams, or a list of one for each prompt")
    if len(params) != number:
        raise RequestError(f"{len(params)} SamplingParams for {number} prompts")
    return list(params)


def _prompt_of(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
        if given is None or isinstance(given, Mapping):
            raise RequestError('a prompt given as a dict needs "prompt" or "prompt_token_ids"')
        return _prompt_of(given)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    return [_plain(token_id) for token_id in _plain(prompt)]


def _plain(value: Any) -> Any:
    """numpy's arrays and numbers as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(prompts: Prompts) -> list[Prompt]:
    """Many prompts as a list; one prompt (text, a dict, a list of ids) as a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise RequestError(f"prompts are text, lists of token ids, or a list of these, not {kind}")
    listed: list[Any] = [_plain(prompt) for prompt in _plain(prompts)]
    return [listed] if listed and isinstance(listed[0], int) else listed


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[Message]]:
    """Several conversations; one is a list of one."""
    if not isinstance(messages, list | tuple):
        raise RequestError("messages must be a list of dicts, or a list of such lists")
    one = not messages or isinstance(messages[0], Mapping)
    conversations: Any = [messages] if one else messages
    for conversation in conversations:
        if not isinstance(conversation, list | tuple):
            raise RequestError("messages must be a list of dicts, or a list of such lists")
    return [list(conversation) for conversation in conversations]


def _progress(total: int, *, enabled: bool) -> Any:
    """A bar on stderr for many prompts; silent for one, or without a terminal."""
    from tqdm import tqdm

    disable = None if enabled and total > 1 else True
    return tqdm(total=total, desc="Answers", unit="answer", disable=disable, dynamic_ncols=True)
