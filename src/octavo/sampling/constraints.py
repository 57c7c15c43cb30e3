"""What may be sampled at all, and biases: the steps before the penalties (R69).

Each changes one row of logits [V] float32 in place. Ids past the vocabulary are ignored: the
engine refuses them at the door, and here they must not reach another row's memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..kernels.api import Array
from .state import RowState


def keep_masked(logits: Array, mask: bytes) -> None:
    """Bar every token whose bit is not set: bit i % 8, the lowest first, of byte i // 8."""
    packed = np.frombuffer(mask, np.uint8)
    allowed = np.unpackbits(packed, count=logits.size, bitorder="little").view(np.bool_)
    np.copyto(logits, -np.inf, where=~allowed)


def apply_constraints(
    logits: Array, state: RowState, keep_masked: Callable[[Array, bytes], None] = keep_masked
) -> None:
    """Grammar (its mask by keep_masked), allow-list, block-list, logit_bias."""
    if state.params.grammar is not None:
        mask, state.mask = state.mask, None
        assert mask is not None, "a request with a grammar came without a mask for this step"
        keep_masked(logits, mask)
    if state.allowed_ids is not None:
        keep_only(logits, state.allowed_ids)
    if state.ending_ids.size and state.num_output_tokens < state.params.min_tokens:
        block(logits, state.ending_ids)
    if state.bad_words is not None:
        block(logits, state.bad_words.barred_ids())
    if state.bias_ids.size:
        add_bias(logits, state.bias_ids, state.bias_values)


def keep_only(logits: Array, token_ids: Array) -> None:
    """Bar every token but these."""
    token_ids = token_ids[token_ids < logits.size]
    kept = logits[token_ids]
    logits.fill(-np.inf)
    logits[token_ids] = kept


def block(logits: Array, token_ids: Array) -> None:
    """Bar these tokens."""
    logits[token_ids[token_ids < logits.size]] = -np.inf


def add_bias(logits: Array, token_ids: Array, values: Array) -> None:
    """Add values [N] float32 to the logits of distinct token_ids [N]."""
    inside = token_ids < logits.size
    logits[token_ids[inside]] += values[inside]
