"""What a request may ask of the sampler and of the stop rules, under vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .errors import RequestError
from .grammar_spec import GrammarSpec

GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy (R72)."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 16_384
"""Of all stop strings together: finding them takes memory for each character."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1024
MAX_PROCESSORS = 8
MAX_BAD_WORD_TOKENS = 64
MAX_ENTRIES = {
    "stop_token_ids": 1024,
    "allowed_token_ids": 2**18,
    "logit_bias": 2**14,
    "bad_words_token_ids": 2**16,
    "logits_processors": MAX_PROCESSORS,
}
"""Of lists whose length costs time in each step."""


def _check(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise RequestError(f"{name} is {value!r}, but must be {wanted}", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_tuple_of_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(x) and x >= 0 for x in value)


_MAY_BE_NONE = ("logprob_token_ids", "bad_words", "bad_words_token_ids")
"""Lists that say the same when they are empty and when they are missing."""


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

    logprobs_mode: str = "raw"
    """raw: of the model's own logits. processed: of what is sampled from, after constraints,
    penalties, temperature and truncation (a greedy row: before the temperature)."""

    logprob_token_ids: tuple[int, ...] = ()
    """Return the log probabilities of these ids too, at each position."""

    prompt_logprobs: int | None = None
    """Return the raw log probability of each prompt token after the first, and of this many
    alternatives (at most 20). Nothing is reused from the prefix cache where they are missing."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), from -100 to 100."""

    allowed_token_ids: tuple[int, ...] | None = None
    """Only these ids may be sampled."""

    bad_words: tuple[str, ...] = ()
    """Texts whose tokens may not follow each other in the output, with and without a space in
    front. Resolved by the engine, which knows the tokenizer, into bad_words_token_ids."""

    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that may not be completed in the output."""

    logits_processors: tuple[tuple[str, tuple[tuple[str, object], ...]], ...] = ()
    """Plug-ins by name, with their settings: {"dry": {"multiplier": 0.8}}. Built in: dry, xtc and
    typical. See octavo.sampling.processors."""

    timeout: float | None = None
    """Seconds from arrival after which the answer ends as it is, with finish_reason timeout."""

    grammar: GrammarSpec | None = None
    """The form that the answer must have: GrammarSpec.json(schema), .regex(...) and so on."""

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
        self._check_logprobs()
        in_range = self.timeout is None or (_is_real(self.timeout) and self.timeout > 0)
        _check(in_range, "timeout", self.timeout, "a number of seconds above 0")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _check(
                isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false"
            )
        self._check_lists()
        valid = self.grammar is None or isinstance(self.grammar, GrammarSpec)
        _check(valid, "grammar", self.grammar, "a GrammarSpec, such as GrammarSpec.json(schema)")

    def _normalise(self) -> None:
        """Accept what callers naturally write: a lone stop string, lists, a dict of biases."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", *_MAY_BE_NONE):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            if value is None and name in _MAY_BE_NONE:
                object.__setattr__(self, name, ())
        if self.stop is None:
            object.__setattr__(self, "stop", ())
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        processors = self.logits_processors or ()
        if isinstance(processors, dict):
            processors = tuple((name, settings or {}) for name, settings in processors.items())
            valid = all(isinstance(settings, dict) for _, settings in processors)
            _check(valid, "logits_processors", self.logits_processors, "names with their settings")
            processors = tuple((name, tuple(each.items())) for name, each in processors)
        object.__setattr__(self, "logits_processors", processors)
        if isinstance(self.logit_bias, dict):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            in_range = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
            _check(in_range, name, value, f"a whole number from 0 to {MAX_LOGPROBS}")
        modes = ("raw", "processed")
        _check(self.logprobs_mode in modes, "logprobs_mode", self.logprobs_mode, "raw or processed")
        _check(
            self.prompt_logprobs is None or self.logprobs_mode == "raw",
            "logprobs_mode",
            self.logprobs_mode,
            "raw where prompt_logprobs are asked for: nothing is sampled there",
        )
        valid = _is_tuple_of_ids(self.logprob_token_ids)
        _check(valid, "logprob_token_ids", self.logprob_token_ids, "a list of token ids")
        few = len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS
        wanted = f"at most {MAX_LOGPROB_TOKEN_IDS} ids"
        _check(few, "logprob_token_ids", len(self.logprob_token_ids), wanted)

    def _check_bad_words(self) -> None:
        words = self.bad_words
        valid = isinstance(words, tuple) and all(isinstance(w, str) and w.strip() for w in words)
        _check(valid, "bad_words", words, "a list of strings, none of them blank")
        _check(len(words) <= MAX_BAD_WORDS, "bad_words", len(words), f"at most {MAX_BAD_WORDS}")
        longest = max(map(len, words), default=0)
        wanted = f"words of at most {MAX_BAD_WORD_CHARS} characters"
        _check(longest <= MAX_BAD_WORD_CHARS, "bad_words", f"{longest} characters long", wanted)
        sequences = self.bad_words_token_ids
        valid = isinstance(sequences, tuple) and all(
            _is_tuple_of_ids(ids) and 1 <= len(ids) <= MAX_BAD_WORD_TOKENS for ids in sequences
        )
        wanted = f"tuples of 1 to {MAX_BAD_WORD_TOKENS} token ids"
        _check(valid, "bad_words_token_ids", sequences, wanted)

    def _check_lists(self) -> None:
        for name, most in MAX_ENTRIES.items():  # first: what follows looks at each entry
            value = getattr(self, name)
            if isinstance(value, tuple):
                _check(len(value) <= most, name, f"{len(value)} entries long", f"at most {most}")
        self._check_bad_words()
        processors = self.logits_processors
        valid = isinstance(processors, tuple)
        _check(valid, "logits_processors", processors, "an object of names with their settings")
        valid = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        _check(valid, "stop", self.stop, "a non-empty string, or a list of them")
        wanted = f"at most {MAX_STOP_STRINGS} strings"
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", wanted)
        size = sum(map(len, self.stop))
        wanted = f"at most {MAX_STOP_CHARS} characters in all"
        _check(size <= MAX_STOP_CHARS, "stop", f"{size} characters long", wanted)
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            _check(_is_tuple_of_ids(value), name, value, "a list of token ids")
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

    @property
    def takes_forced_tokens(self) -> bool:
        """Whether the only token that a grammar allows is what will be sampled, whatever the logits
        are, and nobody asks for its log probability."""
        barring = (self.bad_words_token_ids, self.logits_processors, self.min_tokens)
        return self.logprobs is None and self.allowed_token_ids is None and not any(barring)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all parameters."""
        return tuple(f.name for f in fields(cls))
