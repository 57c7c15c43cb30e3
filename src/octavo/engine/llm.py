"""The engine in this thread: LLM.generate and LLM.chat, blocking, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config import make_config
from ..core.stats import SchedulerStats
from ..errors import RequestError
from ..outputs import CompletionOutput, RequestOutput, StreamEvent
from ..request import Request
from ..sampling_params import SamplingParams
from .build import Engine, build_engine
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
Message = dict[str, Any]


class LLM:
    """A loaded model that answers many prompts at once.

    LLM(model="smollm2-135m", max_num_batched_tokens=2048, ...) takes every setting of
    octavo.config as a keyword and refuses what it does not know (ConfigError).
    """

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        self.config = make_config(model=model, **settings)
        self._engine: Engine = build_engine(self.config)
        self._next_request_id = 0

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
        return SamplingParams(**self._engine.generation.sampling)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt: text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.

        `params` is one for all prompts, or one each; by default the model's own. All prompts are
        checked before any runs: RequestError then names what is wrong, and nothing was computed.
        An answer that a fault ended has finish_reason "error" and says why in `error`.
        """
        listed = _listed(prompts)
        return self._run(listed, self._params_for(len(listed), params), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the model's chat template writes the prompts."""
        first = messages[0] if messages else None
        conversations: Any = [messages] if isinstance(first, Mapping) or first is None else messages
        prompts = [
            self.tokenizer.apply_chat_template(list(conversation), **template)
            for conversation in conversations
        ]
        return self._run(prompts, self._params_for(len(prompts), params), use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Continue one prompt, piece by piece; leaving the loop early aborts the request.

        Raises RequestError while another stream of this LLM is open, and so do the other calls.
        """
        self._check_free()
        _, requests = self._prepare(prompt, params or self.default_params())
        core = self._engine.core
        core.add(requests)
        parent_id = requests[0].request_id
        try:
            while core.has_unfinished():
                yield from (event for event in core.step() if event.request_id == parent_id)
        finally:
            self._abort(requests)

    def close(self) -> None:
        """Give back the model's memory and threads."""
        self._engine.core.executor.close()

    def _check_free(self) -> None:
        """One caller at a time: another's steps would swallow the events of an open stream."""
        if self._engine.core.has_unfinished():
            raise RequestError(
                "a stream of this LLM is still open: read it to its end or close() it first"
            )

    def _params_for(
        self, number: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            return [self.default_params()] * number
        if isinstance(params, SamplingParams):
            return [params] * number
        if len(params) != number:
            raise RequestError(f"{len(params)} SamplingParams for {number} prompts")
        return list(params)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[Request]]:
        """The text (if any) and the checked requests of one prompt."""
        given = _prompt_of(prompt)
        inputs = self._engine.inputs
        if params.grammar is not None:
            self._engine.core.grammars.compile(params.grammar)
        requests = inputs.requests(
            inputs.tokenize(given),
            params,
            request_id=self._next_request_id,
            arrival_time=self._engine.core.now(),
        )
        self._next_request_id += params.n
        return (given if isinstance(given, str) else None), requests

    def _run(
        self, prompts: Sequence[Prompt], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        self._check_free()
        prepared = [self._prepare(p, s) for p, s in zip(prompts, params, strict=True)]
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


def _prompt_of(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return str(prompt["prompt"])
        raise RequestError('a prompt given as a dict needs "prompt" or "prompt_token_ids"')
    return list(prompt)


def _listed(prompts: Prompts) -> list[Prompt]:
    """Many prompts as a list; one prompt (text, a dict, a list of ids) as a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _progress(total: int, *, enabled: bool) -> Any:
    """A bar on stderr for many prompts; silent for one, or without a terminal."""
    from tqdm import tqdm

    disable = None if enabled and total > 1 else True
    return tqdm(total=total, desc="Answers", unit="answer", disable=disable, dynamic_ncols=True)
