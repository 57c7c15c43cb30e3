"""Raw log probabilities: log_softmax of the logits before anything changes them (R67, R68)."""

from __future__ import annotations

import math

import numpy as np

from ..kernels.api import Array
from ..messages import TokenLogprobs
from .truncation import best_tokens


class RawLogprobs:
    """A snapshot of one row, taken for requests that ask, and only for those (C112)."""

    __slots__ = ("_log_sum_exp", "_logits", "_num_top")

    def __init__(self, logits: Array, num_top: int, *, scratch: Array) -> None:
        """logits [V] float32 without NaN, max > -inf, copied; scratch [V] float64."""
        self._num_top = num_top
        self._logits = logits.copy()
        highest = float(logits.max())
        if highest == math.inf:
            # The limit of the softmax: infinite logits share everything.
            self._logits = np.where(logits == np.inf, np.float32(0), np.float32(-np.inf))
            highest = 0.0
        np.subtract(self._logits, highest, out=scratch, dtype=np.float64)
        np.exp(scratch, out=scratch)
        self._log_sum_exp = highest + math.log(float(scratch.sum()))

    def _logprob(self, token_id: int) -> float:
        # The one formula, for the chosen token and for `top`: the same token has the same bits.
        return float(self._logits[token_id]) - self._log_sum_exp

    def of(self, token_id: int) -> TokenLogprobs:
        """Log probability and rank of `token_id`, and the best alternatives."""
        logits = self._logits
        value = logits[token_id]
        num_better = int(np.count_nonzero(logits > value))
        num_tied_before = int(np.count_nonzero(logits[:token_id] == value))
        top: tuple[tuple[int, float], ...] = ()
        if self._num_top:
            best = best_tokens(logits, self._num_top)
            best = best[np.argsort(-logits[best], kind="stable")]
            top = tuple((i, self._logprob(i)) for i in best.tolist())
        return TokenLogprobs(self._logprob(token_id), 1 + num_better + num_tied_before, top)
