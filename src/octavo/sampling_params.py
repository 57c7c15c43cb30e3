"""What a request may ask of the sampler and of the stop rules, under vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .errors import RequestError

GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy (R72)."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64


def _check(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise RequestError(f"{name} is {value!r}, but must be {wanted}", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked at construction; raises RequestError that names the field. Hashable parts are tuples.

    Vocabulary bounds (logit_bias, allowed_token_ids, stop_token_ids) are checked by the engine,
    which knows the model.
    """

    n: int = 1
    """Answers to one prompt, each with its own derived seed."""

    temperature: float = 1.0
    """0 means greedy; below 1 sharpens the distribution, above 1 flattens it."""

    top_p: float = 1.0
    """Keep the most likely tokens until their probabilities sum to this."""

    top_k: int = 0
    """Keep the k most likely tokens. 0 or -1: no limit."""

    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""

    repetition_penalty: float = 1.0
    """Divide (or multiply, below zero) the logits of tokens seen in prompt or output."""

    presence_penalty: float = 0.0
    """Subtract from the logits of tokens already in the output."""

    frequency_penalty: float = 0.0
    """Subtract from the logits of output tokens, times their number so far."""

    seed: int | None = None
    """64-bit seed of this request's noise. Unset or -1: derived by the engine, and reported."""

    max_tokens: int | None = None
    """Tokens to generate at most. Default: what max_model_len leaves."""

    min_tokens: int = 0
    """End-of-sequence and stop ids can't be sampled before this many tokens."""

    stop: tuple[str, ...] = ()
    """Text that ends the answer; it is left out unless include_stop_str_in_output."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own."""

    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""

    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""

    logprobs: int | None = None
    """Return the log probability of each token, and of this many alternatives (at most 20)."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), from -100 to 100."""

    allowed_token_ids: tuple[int, ...] | None = None
    """Only these ids may be sampled."""

    timeout: float | None = None
    """Seconds from arrival after which the answer ends as it is, with finish_reason timeout."""

    def __post_init__(self) -> None:
        self._normalise()
        _check(_is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "a whole number, 1 to 128")
        in_range = _is_real(self.temperature) and 0 <= self.temperature <= 100
        _check(in_range, "temperature", self.temperature, "a number from 0 to 100")
        in_range = _is_real(self.top_p) and 0 < self.top_p <= 1
        _check(in_range, "top_p", self.top_p, "a number above 0, at most 1")
        _check(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "-1, 0 or above")
        in_range = _is_real(self.min_p) and 0 <= self.min_p <= 1
        _check(in_range, "min_p", self.min_p, "a number from 0 to 1")
        in_range = _is_real(self.repetition_penalty) and 0 < self.repetition_penalty <= 100
        _check(in_range, "repetition_penalty", self.repetition_penalty, "above 0, at most 100")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_real(value) and -2 <= value <= 2, name, value, "a number from -2 to 2")
        in_range = self.seed is None or (_is_int(self.seed) and -1 <= self.seed < 2**63)
        _check(in_range, "seed", self.seed, "a whole number from 0 to 2**63-1, or -1 for none")
        in_range = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 0)
        _check(in_range, "max_tokens", self.max_tokens, "a whole number, 0 or above")
        in_range = _is_int(self.min_tokens) and self.min_tokens >= 0
        _check(in_range, "min_tokens", self.min_tokens, "a whole number, 0 or above")
        if self.max_tokens is not None:
            wanted = f"at most max_tokens ({self.max_tokens})"
            _check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, wanted)
        in_range = self.logprobs is None or (
            _is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS
        )
        _check(in_range, "logprobs", self.logprobs, f"a whole number from 0 to {MAX_LOGPROBS}")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _check(
                isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false"
            )
        in_range = self.timeout is None or (_is_real(self.timeout) and self.timeout > 0)
        _check(in_range, "timeout", self.timeout, "a number of seconds above 0")
        self._check_lists()

    def _normalise(self) -> None:
        """Accept what callers naturally write: a lone stop string, lists, a dict of biases."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if self.stop is None:
            object.__setattr__(self, "stop", ())
        if isinstance(self.logit_bias, dict):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))

    def _check_lists(self) -> None:
        valid = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        _check(valid, "stop", self.stop, "a non-empty string, or a list of them")
        wanted = f"at most {MAX_STOP_STRINGS} strings"
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", self.stop, wanted)
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            valid = isinstance(value, tuple) and all(_is_int(x) and x >= 0 for x in value)
            _check(valid, name, value, "a list of token ids")
        _check(self.allowed_token_ids != (), "allowed_token_ids", [], "a list of at least one id")
        valid = isinstance(self.logit_bias, tuple) and all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and _is_int(pair[0])
            and pair[0] >= 0
            and _is_real(pair[1])
            and -100 <= pair[1] <= 100
            for pair in self.logit_bias
        )
        _check(valid, "logit_bias", self.logit_bias, "token ids with values from -100 to 100")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_EPSILON

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all parameters."""
        return tuple(f.name for f in fields(cls))
