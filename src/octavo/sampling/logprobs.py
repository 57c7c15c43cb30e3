"""Log probabilities of one row: log_softmax of its logits (R67, R68)."""

from __future__ import annotations

import math

import numpy as np

from ..kernels.api import Array
from ..messages import TokenLogprobs
from .truncation import best_tokens


class RowLogprobs:
    """log_softmax of one row, for requests that ask, and only for those (C112)."""

    __slots__ = ("_log_sum_exp", "_logits")

    def __init__(self, logits: Array, *, scratch: Array) -> None:
        """logits [V] float32 without NaN, max > -inf, which must not change while this is used;
        scratch [V] float64."""
        self._logits = logits
        highest = float(logits.max())
        if highest == math.inf:
            # The limit of the softmax: infinite logits share everything.
            self._logits = np.where(logits == np.inf, np.float32(0), np.float32(-np.inf))
            highest = 0.0
        np.subtract(self._logits, highest, out=scratch, dtype=np.float64)
        np.exp(scratch, out=scratch)
        self._log_sum_exp = highest + math.log(float(scratch.sum()))

    def _logprob(self, token_id: int) -> float:
        # The one formula, for the chosen token and for all others: the same token, the same bits.
        return float(self._logits[token_id]) - self._log_sum_exp

    def of(self, token_id: int, num_top: int, named: tuple[int, ...] = ()) -> TokenLogprobs:
        """Log probability and rank of `token_id`, the best `num_top`, and those of `named`."""
        logits = self._logits
        value = logits[token_id]
        num_better = int(np.count_nonzero(logits > value))
        num_tied_before = int(np.count_nonzero(logits[:token_id] == value))
        top: tuple[tuple[int, float], ...] = ()
        if num_top:
            best = best_tokens(logits, num_top)
            best = best[np.argsort(-logits[best], kind="stable")]
            top = tuple((i, self._logprob(i)) for i in best.tolist())
        others = tuple((i, self._logprob(i)) for i in named if i < logits.size)
        rank = 1 + num_better + num_tied_before
        return TokenLogprobs(self._logprob(token_id), rank, top, others)
