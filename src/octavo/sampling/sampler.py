"""Which token comes next, for each sampled row."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from ..kernels.api import Array
from ..messages import RowFault, SampledToken
from .constraints import apply_constraints
from .logprobs import RawLogprobs
from .noise import exponential, hash_tokens, random_bits, token_counters
from .penalties import apply_penalties
from .state import RowState
from .truncation import truncate

logger = logging.getLogger(__name__)

_SLACK = 1 + 2.0**-12
"""Covers what float32 rounds away in _draw_from_all's first look (below 2**-17)."""


class _NothingToSample(Exception):
    """No token of the row is possible; the text is for the user."""


class Sampler:
    """Turns logits into tokens, in this order (R69-R84):

    0. NaN logits become impossible; a row with no finite or +inf logit left is a fault (C37)
    1. raw logprobs snapshot, for rows that ask (R67)
    2. grammar mask, allow-list, block-list (end-of-sequence and stop ids before min_tokens),
       logit_bias, penalties (R69-R71)
    3. greedy rows take the argmax here and skip the rest (R72, R73)
    4. temperature (R74, R75)
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

    def sample(self, logits: Array, rows: Sequence[RowState]) -> list[SampledToken | RowFault]:
        """One result for each of rows [S], in order. logits [S, V] float32 may be overwritten."""
        assert logits.shape == (len(rows), self.vocab_size), "one row of logits for each state"
        assert logits.dtype == np.float32, "logits are float32"
        assert logits.flags.c_contiguous, "rows are contiguous"
        results: list[SampledToken | RowFault] = []
        # -inf is a value here (a barred token), and so are the operations on it.
        with np.errstate(all="ignore"):
            for row_logits, state in zip(logits, rows, strict=True):
                try:
                    results.append(self._sample_row(row_logits, state))
                except _NothingToSample as error:
                    results.append(RowFault(state.row, str(error)))
                except Exception as error:  # whatever it is, the other rows go on
                    logger.exception("sampling failed for request %d", state.request_id)
                    message = f"sampling failed: {type(error).__name__}: {error}"
                    results.append(RowFault(state.row, message))
        return results

    def _sample_row(self, logits: Array, state: RowState) -> SampledToken:
        """Steps 0 to 9 on one row, logits [V]."""
        params = state.params
        best = _possible_argmax(logits)
        raw: RawLogprobs | None = None
        if params.logprobs is not None:
            scratch = self._scratch.view(np.float64)
            raw = RawLogprobs(logits, params.logprobs, scratch=scratch)
        constrained = apply_constraints(logits, state)
        penalised = apply_penalties(logits, state)
        if constrained or penalised:
            best = int(logits.argmax())
            if logits[best] == -np.inf:
                raise _NothingToSample(
                    "no token is left to sample: grammar, allowed_token_ids, min_tokens, stop ids "
                    "and logit_bias together bar them all"
                )
        token_id = best if params.greedy else self._draw(logits, best, state)
        return SampledToken(state.row, token_id, raw.of(token_id) if raw else None)

    def _draw(self, logits: Array, best: int, state: RowState) -> int:
        """Steps 4 to 8. `best` is the argmax of logits."""
        scaled = self._scale(logits, best, state.params.temperature)
        ids = truncate(scaled, state.params)
        if ids is None:
            return self._draw_from_all(scaled, best, state)
        return _argmax_of_ratio(scaled, ids, random_bits(state.seed, state.position, ids))

    def _scale(self, logits: Array, best: int, temperature: float) -> Array:
        """scaled[V] = (logits - max) / temperature: never above 0, so it can't overflow.

        A softmax does not see the shift. Infinite logits share everything, as in its limit.
        """
        scaled = self._scaled
        highest = logits[best]
        if highest == np.inf:
            scaled.fill(-np.inf)
            scaled[logits == np.inf] = 0
            return scaled
        np.subtract(logits, highest, out=scaled)
        if temperature != 1:
            np.divide(scaled, np.float32(temperature), out=scaled)
        return scaled

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


def _possible_argmax(logits: Array) -> int:
    """Step 0: argmax of logits [V] after NaNs became -inf in place.

    argmax itself finds a NaN, so a sound row costs one pass.
    """
    best = int(logits.argmax())
    if math.isnan(logits[best]):
        logits[np.isnan(logits)] = -np.inf
        best = int(logits.argmax())
    if logits[best] == -np.inf:
        raise _NothingToSample("the model's logits are all NaN or -inf at this position")
    return best


def _argmax_of_ratio(scaled: Array, ids: Array, bits: Array) -> int:
    """The id of ids [N], ascending, with the largest p / q; the lowest of equals."""
    ratios = np.exp(scaled[ids], dtype=np.float64) / exponential(bits)
    return int(ids[ratios.argmax()])
