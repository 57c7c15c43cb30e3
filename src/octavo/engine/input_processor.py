"""From what a caller asks to requests that a scheduler can take: every check happens here.

Pure: it reads limits, never state, so callers may use it from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ..checkpoint import GenerationDefaults
from ..core.limits import Limits
from ..errors import RequestError, RequestTooLarge
from ..request import Request
from ..sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from .tokenizer import Tokenizer

_MASK = 2**64 - 1
SEED_BITS = 53
"""Of derived seeds: every JSON reader keeps such a number exact, so it can be sent again."""


def derive_seed(seed: int, number: int) -> int:
    """The `number`-th seed that follows from `seed` (SplitMix64's output, cut to SEED_BITS)."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> (64 - SEED_BITS)


class InputProcessor:
    """Turns prompts and parameters into checked Requests, one for each of the n answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        generation: GenerationDefaults,
        *,
        vocab_size: int,
        seed: int,
        check: Callable[[SamplingParams], None] = lambda params: None,
    ) -> None:
        """limits: the scheduler's own, so that what it can never run is refused here already.
        check: raises RequestError for what the executor's sampler can't do."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.vocab_size = vocab_size
        self.eos_token_ids = generation.eos_token_ids
        self.seed = seed
        self.check = check

    def tokenize(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt. Raises RequestError for empty prompts and ids out of range."""
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        if not isinstance(prompt, str):
            for token_id in token_ids:
                if not isinstance(token_id, int) or isinstance(token_id, bool):
                    raise RequestError(f"{token_id!r} is no token id", param="prompt")
            self._check_ids(token_ids, "prompt")
        return token_ids

    def requests(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: int,
        arrival_time: float,
        priority: int = 0,
        cache_scope: str = "",
        tenant: str = "",
    ) -> list[Request]:
        """One Request for each of params.n answers, numbered from `request_id`.

        Raises RequestError or RequestTooLarge for what can never run.
        """
        self._check_params(params)
        self.check(params)
        if params.bad_words:
            params = replace(params, bad_words=(), bad_words_token_ids=self._bad_words(params))
        room = self.limits.max_output_tokens(len(token_ids))
        if room < 1 and params.max_tokens != 0:
            needed, limit = len(token_ids) + 1, len(token_ids) + room
            raise RequestTooLarge("prompt and one output token, in tokens", needed, limit)
        if params.max_tokens is not None and params.max_tokens > room:
            needed, limit = len(token_ids) + params.max_tokens, len(token_ids) + room
            raise RequestTooLarge("prompt and max_tokens, in tokens", needed, limit)
        seed = params.seed
        if seed is None or seed == -1:
            seed = derive_seed(self.seed, request_id)
        requests: list[Request] = []
        for index in range(params.n):
            request = Request(
                request_id + index,
                token_ids,
                replace(params, n=1),
                max_tokens=room if params.max_tokens is None else max(1, params.max_tokens),
                seed=seed if index == 0 else derive_seed(seed, index),
                eos_token_ids=self.eos_token_ids,
                priority=priority,
                arrival_time=arrival_time,
                cache_scope=cache_scope,
                leader=requests[0] if requests else None,
                tenant=tenant,
            )
            requests.append(request)
        self.limits.check(requests[0])
        return requests

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each bad word, at the start of a text and after a space (C40)."""
        sequences = dict.fromkeys(params.bad_words_token_ids)
        for word in params.bad_words:
            for text in (word, word.lstrip(), " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    text = f"bad_words: {word[:64]!r} is {len(ids)} tokens long, but"
                    raise RequestError(f"{text} may be {MAX_BAD_WORD_TOKENS}", param="bad_words")
                sequences[tuple(ids)] = None
        return tuple(sequences)

    def _check_params(self, params: SamplingParams) -> None:
        """Bounds that depend on the model (C38)."""
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            text = "max_tokens is 0: nothing to generate; only prompt_logprobs may go with that"
            raise RequestError(text, param="max_tokens")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            self._check_ids(getattr(params, name) or (), name)
        for ids in params.bad_words_token_ids:
            self._check_ids(ids, "bad_words_token_ids")
        self._check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias")

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            message = f"{param}: token id {wrong} is outside 0 to {self.vocab_size - 1}"
            raise RequestError(message, param=param)
