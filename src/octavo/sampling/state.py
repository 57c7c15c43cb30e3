"""What the sampler knows of a request: kept per request, never per row of a batch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..kernels.api import Array
from ..messages import NewRequest
from ..sampling_params import SamplingParams
from . import processors
from .bad_words import BadWords

_MAX_TOKEN_ID = 2**31
"""No vocabulary reaches this far; larger ids are dropped before they overflow an index."""


def token_array(token_ids: Iterable[int]) -> Array:
    """[N] int64 of those ids that can be an index. The sampler drops ids past the vocabulary."""
    return np.array([i for i in token_ids if 0 <= i < _MAX_TOKEN_ID], dtype=np.int64)


class TokenCounts:
    """How often each token occurred; adding one costs the same after 20,000 as after 10."""

    __slots__ = ("_counts", "_ids", "_slot_of")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        ids, counts = np.unique(token_array(token_ids), return_counts=True)
        self._ids: Array = ids
        self._counts: Array = counts.astype(np.float32)
        self._slot_of = {token_id: slot for slot, token_id in enumerate(ids.tolist())}

    def add(self, token_id: int) -> None:
        """Count one more occurrence."""
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = self._slot_of[token_id] = len(self._slot_of)
            if slot == self._ids.size:
                room = max(16, slot)  # doubling keeps the mean cost of a growth constant
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
            self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> Array:
        """[N] int64, distinct, in no particular order; a view."""
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> Array:
        """[N] float32, beside `ids`; a view."""
        return self._counts[: len(self._slot_of)]


class RowState:
    """A request's parameters and the history that its penalties and its noise depend on.

    Counts are kept only for the penalties that the request asks for. A request that resumes
    after a preemption builds the same state from its tokens as it had before.
    """

    def __init__(self, start: NewRequest) -> None:
        params: SamplingParams = start.params
        self.row = start.row
        self.request_id = start.request_id
        self.params = params
        self.seed = start.seed
        self.num_prompt_tokens = start.num_prompt_tokens
        self.num_tokens = len(start.token_ids)
        self.ending_ids: Array = token_array((*start.eos_token_ids, *params.stop_token_ids))
        """End-of-sequence and stop ids: barred before min_tokens."""
        self.allowed_ids: Array | None = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = token_array(set(params.allowed_token_ids))
        self.bad_words: BadWords | None = None
        if params.bad_words_token_ids:
            output = start.token_ids[start.num_prompt_tokens :]
            self.bad_words = BadWords(params.bad_words_token_ids, output)
        self.processors = processors.make(
            params, start.token_ids, num_prompt=start.num_prompt_tokens, seed=start.seed
        )
        self.mask: bytes | None = None
        """Packed tokens that the grammar allows, for one step: used up by it."""
        bias: dict[int, float] = {}
        for token_id, value in params.logit_bias:
            if token_id < _MAX_TOKEN_ID:
                bias[token_id] = bias.get(token_id, 0.0) + value
        self.bias_ids: Array = token_array(bias)
        self.bias_values: Array = np.array(list(bias.values()), dtype=np.float32)
        self.seen_counts: TokenCounts | None = None
        """Tokens of prompt and output: what the repetition penalty looks at."""
        if params.repetition_penalty != 1:
            self.seen_counts = TokenCounts(start.token_ids)
        self.output_counts: TokenCounts | None = None
        """Tokens of the output: what presence and frequency penalties look at."""
        if params.presence_penalty or params.frequency_penalty:
            self.output_counts = TokenCounts(start.token_ids[start.num_prompt_tokens :])

    def append(self, token_id: int) -> None:
        """Take note of a token that became part of the output (R84)."""
        self.num_tokens += 1
        if self.bad_words is not None:
            self.bad_words.append(token_id)
        for processor in self.processors:
            processor.append(token_id)
        if self.seen_counts is not None:
            self.seen_counts.add(token_id)
        if self.output_counts is not None:
            self.output_counts.add(token_id)

    @property
    def changes_logits(self) -> bool:
        """Whether constraints or penalties apply to the next token."""
        return (
            self.params.grammar is not None
            or self.allowed_ids is not None
            or self.bad_words is not None
            or bool(self.processors)
            or self.seen_counts is not None
            or self.output_counts is not None
            or bool(self.bias_ids.size)
            or bool(self.ending_ids.size and self.num_output_tokens < self.params.min_tokens)
        )

    @property
    def takes_argmax(self) -> bool:
        """Whether the next token is the model's own argmax, and no more is asked of its logits."""
        params = self.params
        return params.greedy and params.logprobs is None and not self.changes_logits

    @property
    def truncates(self) -> bool:
        """Whether plug-ins truncate."""
        return any(processor.stage == "truncation" for processor in self.processors)

    @property
    def position(self) -> int:
        """Index in the sequence of the token to be sampled next."""
        return self.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens
