"""What a model is given for one step: every array flat over the requests, nothing padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..kernels.api import Array


class ExtraRows(NamedTuple):
    """Rows whose logits are looked at, but not sampled: for prompt logprobs (R62)."""

    indices: Array
    """[P] int32; P may be near T, so that their logits [P, V] would be far larger than the model's
    other memory: they come in slices."""

    take: Callable[[int, Array], None]
    """take(first, logits [n, V] float32) for indices[first : first + n], slice after slice; the
    memory is used again for the next."""


class ForwardBatch(NamedTuple):
    """Index arrays of one step, all int32; T, B, S as in kernels/api.py."""

    input_ids: Array
    """[T] tokens to compute."""

    positions: Array
    """[T] where each stands in its own sequence."""

    slot_mapping: Array
    """[T] slot that each token's K/V are written to (R25)."""

    query_start_loc: Array
    """[B + 1] prefix sums of the scheduled lengths: request b owns rows [b] to [b + 1] (R44)."""

    seq_lens: Array
    """[B] K/V tokens that each request attends to after this step."""

    block_table: Array
    """[B, max_num_blocks] physical block of each virtual block; -1 past the end (R23)."""

    logits_indices: Array
    """[S] rows whose logits are wanted (R61)."""

    extra: ExtraRows | None = None
