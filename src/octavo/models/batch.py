"""What a model is given for one step: every array flat over the requests, nothing padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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
    """[S] rows whose logits are wanted (R61, R62)."""

    argmax_only: Array
    """[S] 1 where no more is wanted of them than which is the largest, else 0."""

    sampled_positions: Array | None = None
    """[S] where each of these stands."""

    sampled_start_loc: Array | None = None
    """[B + 1] prefix sums of how many of these each request has, given where they are its last
    rows, so that they attend as a step of their own (R64)."""


def trace_batches() -> tuple[ForwardBatch, ForwardBatch]:
    """Two steps to capture a model with, one that samples and one that doesn't; T != B, S != T.

    Three requests of 1, 2 and 2 tokens that all write to the first block's first slots: whatever
    the sizes of pool and blocks, they fit, if not two tokens then one over the other.
    """
    starts = np.array([0, 1, 3, 5], np.int32)
    zeros = np.zeros(5, np.int32)
    plain = ForwardBatch(
        input_ids=zeros,
        positions=zeros.copy(),
        slot_mapping=zeros.copy(),
        query_start_loc=starts,
        seq_lens=np.diff(starts),
        block_table=np.zeros((3, 2), np.int32),
        logits_indices=starts[1:] - 1,
        argmax_only=np.array([1, 0, 1], np.int32),
        sampled_positions=np.zeros(3, np.int32),
        sampled_start_loc=np.arange(4, dtype=np.int32),
    )
    names = ("logits_indices", "argmax_only", "sampled_positions")
    none = {name: np.empty(0, np.int32) for name in names}
    return plain, plain._replace(sampled_start_loc=np.zeros(4, np.int32), **none)
