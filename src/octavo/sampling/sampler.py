"""Which token comes next, for each sampled row."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from ..errors import RequestError
from ..kernels.api import Array
from ..messages import RowFault, SampledToken, TokenLogprobs
from .constraints import apply_constraints, keep_masked
from .logprobs import RowLogprobs
from .noise import exponential, hash_tokens, random_bits, token_counters
from .penalties import apply_penalties
from .processors import Stage
from .state import RowState
from .truncation import truncate

logger = logging.getLogger(__name__)

_SLACK = 1 + 2.0**-12
"""Covers what float32 rounds away in _draw_from_all's first look (below 2**-17)."""


class NothingToSample(Exception):
    """The model, or a plug-in, leaves no token possible; the text is for the user."""


class Sampler:
    """Turns logits into tokens, in this order (R69-R84):

    0. NaN logits become impossible; a row with no finite or +inf logit left is a fault (C37)
    1. raw logprobs snapshot, for rows that ask (R67); those that ask for processed ones get
       them of what step 3 (greedy) or step 7 leaves (C28)
    2. grammar mask, allow-list, block-list (end-of-sequence and stop ids before min_tokens, then
       bad words), logit_bias, plug-ins (processors.py), penalties (R69-R71)
    3. greedy rows take the argmax here and skip the rest (R72, R73); those of which nothing else
       is asked come with it, found by the LM head (RowState.takes_argmax)
    4. temperature (R74, R75); b: plug-ins that truncate
    5. min_p (R76-R78)
    6. top-k (R79, R80)
    7. top-p over what is left (R81)
    8. argmax of p / q, with q exponential noise from (seed, position, token id) (R82)
    9. a row's token is the one of step 3 or of step 8, by its temperature (R83)

    A row passes through all of them before the next row starts, on contiguous memory of its own,
    so its token can't depend on its neighbours or on its place: not in a single bit. A row that
    fails, fails alone (C106). Equal values rank by id, ascending, everywhere.

    Holds scratch memory, so a sampler serves one thread. The caller appends the token to the
    row's state (R84).
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._counters = token_counters(np.arange(vocab_size))
        self._scaled = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.float32)
        self._bits = np.empty(vocab_size, np.uint64)
        self._scratch = np.empty(vocab_size, np.uint64)
        self._keep_masked: Callable[[Array, bytes], None] = keep_masked

    def sample(
        self, logits: Array, rows: Sequence[RowState], best: Array | None = None
    ) -> list[SampledToken | RowFault]:
        """One result for each of rows [S], in order. logits [S, V] float32 may be overwritten.

        best [S] int32: the token of a row whose argmax is all that is asked for, where the LM head
        found it; such a row has no logits. -1 elsewhere.
        """
        assert logits.shape == (len(rows), self.vocab_size), "one row of logits for each state"
        assert logits.dtype == np.float32, "logits are float32"
        assert logits.flags.c_contiguous, "rows are contiguous"
        # -inf is a value here (a barred token), and so are the operations on it.
        found = found_tokens(rows, best)
        with np.errstate(all="ignore"):
            return [
                found[i] if i in found else guarded(self._sample_row, logits[i], state)
                for i, state in enumerate(rows)
            ]

    def _sample_row(self, logits: Array, state: RowState) -> SampledToken:
        """Steps 0 to 9 on one row, logits [V]."""
        _possible_argmax(logits)
        params = state.params
        raw: RowLogprobs | None = None
        if params.logprobs is not None and params.logprobs_mode == "raw":
            raw = self._logprobs(logits.copy() if state.changes_logits else logits)
        self._prepare(logits, state)
        return self._choose(logits, state, raw)

    def _prepare(self, logits: Array, state: RowState) -> None:
        """Step 2 on one row [V] in place."""
        apply_constraints(logits, state, self._keep_masked)
        _apply_processors("logits", logits, state)
        apply_penalties(logits, state)

    def _choose(self, logits: Array, state: RowState, logprobs: RowLogprobs | None) -> SampledToken:
        """Steps 3 to 9 on one row, logits [V], whose raw logprobs were taken if they are wanted."""
        params = state.params
        best = int(logits.argmax())
        if logits[best] == -np.inf:
            raise RequestError(
                "no token is left to sample: grammar, allowed_token_ids, min_tokens, stop ids, "
                "bad_words and logit_bias together bar them all"
            )
        token_id, ids = (best, None) if params.greedy else self._draw(logits, best, state)
        if params.logprobs is None:
            return SampledToken(state.row, token_id)
        if logprobs is None:
            logprobs = self._logprobs(logits if params.greedy else _only(self._scaled, ids))
        found = logprobs.of(token_id, params.logprobs, params.logprob_token_ids)
        return SampledToken(state.row, token_id, found)

    def score(
        self, logits: Array, token_ids: Sequence[int], num_tops: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Raw log probabilities of prompt tokens [n] after logits [n, V], which may be
        overwritten; None where the logits are no numbers."""
        found: list[TokenLogprobs | None] = []
        with np.errstate(all="ignore"):
            for row_logits, token_id, num_top in zip(logits, token_ids, num_tops, strict=True):
                try:
                    _possible_argmax(row_logits)
                    found.append(self._logprobs(row_logits).of(token_id, num_top))
                except NothingToSample:
                    found.append(None)
        return found

    def _logprobs(self, logits: Array) -> RowLogprobs:
        return RowLogprobs(logits, scratch=self._scratch.view(np.float64))

    def _draw(self, logits: Array, best: int, state: RowState) -> tuple[int, Array | None]:
        """Steps 4 to 8, and the ids that truncation left. `best` is the argmax of logits."""
        scaled, best = self._scale(logits, best, state)
        ids = truncate(scaled, state.params)
        if ids is None:
            return self._draw_from_all(scaled, best, state), None
        bits = random_bits(state.seed, state.position, ids)
        return _argmax_of_ratio(scaled, ids, bits), ids

    def _scale(self, logits: Array, best: int, state: RowState) -> tuple[Array, int]:
        """Step 4: scaled[V] = (logits - max) / temperature, after plug-ins, and its argmax.

        Never above 0, so it can't overflow; a softmax does not see the shift. Infinite logits
        share everything, as in its limit.
        """
        scaled, temperature = self._scaled, state.params.temperature
        highest = logits[best]
        if highest == np.inf:
            scaled.fill(-np.inf)
            scaled[logits == np.inf] = 0
        else:
            np.subtract(logits, highest, out=scaled)
            if temperature != 1:
                np.divide(scaled, np.float32(temperature), out=scaled)
        if state.truncates:
            _apply_processors("truncation", scaled, state)
            best = int(scaled.argmax())
            if scaled[best] != 0:  # what follows wants the best one at 0 again
                scaled -= scaled[best]
        return scaled, best

    def _draw_from_all(self, scaled: Array, best: int, state: RowState) -> int:
        """Step 8 over the whole vocabulary, without a logarithm for each token.

        The token at `best` has weight 1, so the winner's ratio is at least 1 / q_best. As
        q >= u, token i can only win if u_i <= weight_i * q_best. A first look in float32, with
        slack for its rounding, leaves few tokens for the exact one.
        """
        bits = self._bits
        position = state.position
        hash_tokens(state.seed, position, self._counters, scratch=self._scratch, out=bits)
        limits = self._weights
        np.exp(scaled, out=limits)
        q_best = float(exponential(bits[best : best + 1])[0])
        np.multiply(limits, np.float32(q_best * 2.0**32 * _SLACK), out=limits)
        # The scaled values are needed again, so the bits in float32 go to spare memory.
        bits32 = self._scratch.view(np.float32)[: self.vocab_size]
        np.copyto(bits32, bits, casting="same_kind")
        ids = np.flatnonzero(bits32 <= limits)
        return _argmax_of_ratio(scaled, ids, bits[ids])


def found_tokens(
    rows: Sequence[RowState], best: Array | None
) -> dict[int, SampledToken | RowFault]:
    """Steps 0 to 9 of the rows for which the LM head did them, by place."""
    token_ids = [] if best is None else best.tolist()
    return {i: SampledToken(rows[i].row, each) for i, each in enumerate(token_ids) if each >= 0}


Outcome = TypeVar("Outcome")


def guarded(
    sample: Callable[[Array, RowState], Outcome], logits: Array, state: RowState
) -> Outcome | RowFault:
    """sample(logits [V], state); whatever goes wrong, the other rows go on (C106)."""
    try:
        return sample(logits, state)
    except NothingToSample as error:
        return RowFault(state.row, str(error))
    except RequestError as error:
        return RowFault(state.row, str(error), refused=True)
    except Exception as error:
        logger.exception("sampling failed for request %d", state.request_id)
        return RowFault(state.row, f"sampling failed: {type(error).__name__}: {error}")


def _possible_argmax(logits: Array) -> int:
    """Step 0: argmax of logits [V] after NaNs became -inf in place.

    argmax itself finds a NaN, so a sound row costs one pass.
    """
    best = int(logits.argmax())
    if math.isnan(logits[best]):
        logits[np.isnan(logits)] = -np.inf
        best = int(logits.argmax())
    if logits[best] == -np.inf:
        raise NothingToSample("the model's logits are all NaN or -inf at this position")
    return best


def _apply_processors(stage: Stage, logits: Array, state: RowState) -> None:
    """The request's plug-ins of one stage, in its order, on one row [V] in place."""
    for processor in state.processors:
        if processor.stage == stage:
            processor.apply(logits)
            best = logits.max() if logits.size else -np.inf
            if not best > -np.inf:
                name = type(processor).__name__
                raise NothingToSample(f"no token is left to sample: {name} drops them all")


def _only(scaled: Array, ids: Array | None) -> Array:
    """scaled [V] with all but `ids` impossible; None for everything."""
    if ids is None:
        return scaled
    kept = np.full_like(scaled, -np.inf)
    kept[ids] = scaled[ids]
    return kept


def _argmax_of_ratio(scaled: Array, ids: Array, bits: Array) -> int:
    """The id of ids [N], ascending, with the largest p / q; the lowest of equals."""
    ratios = np.exp(scaled[ids], dtype=np.float64) / exponential(bits)
    return int(ids[ratios.argmax()])
