"""Penalties for what was said already, on one row of logits [V] float32 in place (R71, C31).

Repetition is CTRL's (Keskar et al. 2019) over prompt and output; presence and frequency are
OpenAI's, over the output only.
"""

from __future__ import annotations

import numpy as np

from ..kernels.api import Array
from .state import RowState


def apply_penalties(logits: Array, state: RowState) -> None:
    """Repetition, then frequency, then presence."""
    params = state.params
    if state.seen_counts is not None:
        penalise_repetition(logits, state.seen_counts.ids, params.repetition_penalty)
    counts = state.output_counts
    if counts is not None:
        inside = counts.ids < logits.size
        ids = counts.ids[inside]
        if params.frequency_penalty:
            logits[ids] -= counts.counts[inside] * np.float32(params.frequency_penalty)
        if params.presence_penalty:
            logits[ids] -= np.float32(params.presence_penalty)


def penalise_repetition(logits: Array, token_ids: Array, penalty: float) -> None:
    """Make each of distinct token_ids [N] less likely, once, however often it occurred.

    Dividing would raise a negative logit, so those are multiplied.
    """
    token_ids = token_ids[token_ids < logits.size]
    scores = logits[token_ids]
    factor = np.float32(penalty)
    logits[token_ids] = np.where(scores > 0, scores / factor, scores * factor)
