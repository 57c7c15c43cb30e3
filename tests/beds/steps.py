"""Steps without a scheduler: flat batches built token by token, and sequences driven through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.kernels.api import Kernels, KVCache
from octavo.models.batch import ForwardBatch
from octavo.models.registry import Model


class Part(NamedTuple):
    """What one request computes in a step: positions [num_computed, num_computed + num_new)."""

    token_ids: list[int]
    num_computed: int
    num_new: int
    block_ids: list[int]
    wanted: list[int]
    """Positions whose logits are wanted."""


def naive_batch(parts: list[Part], block_size: int) -> ForwardBatch:
    """A step's arrays the slow way, straight from their definitions."""
    input_ids, positions, slots, starts, seq_lens, wanted = [], [], [], [0], [], []
    ends_wanted, counts = True, [0]
    for part in parts:
        for position in range(part.num_computed, part.num_computed + part.num_new):
            if position in part.wanted:
                wanted.append(len(input_ids))
            input_ids.append(part.token_ids[position])
            positions.append(position)
            block_id = part.block_ids[position // block_size]
            slots.append(block_id * block_size + position % block_size)
        starts.append(len(input_ids))
        seq_lens.append(part.num_computed + part.num_new)
        counts.append(len(wanted))
        tail = range(starts[-1] - (counts[-1] - counts[-2]), starts[-1])
        ends_wanted = ends_wanted and wanted[counts[-2] :] == list(tail)
    width = max(len(part.block_ids) for part in parts)
    table = [part.block_ids + [-1] * (width - len(part.block_ids)) for part in parts]
    columns = [input_ids, positions, slots, starts, seq_lens, table, wanted, [0] * len(wanted)]
    if ends_wanted:
        columns += [[positions[row] for row in wanted], counts]
    return ForwardBatch(*(np.array(column, np.int32) for column in columns))


@dataclass
class Sequence:
    """One request of a drive; `logits` grows to one row [V] for each computed position."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    logits: np.ndarray | None = None

    def part(self, num_new: int) -> Part:
        end = self.num_computed + num_new
        return Part(
            self.token_ids[:end],
            self.num_computed,
            num_new,
            self.block_ids,
            list(range(self.num_computed, end)),
        )


class Drive:
    """A model with a poisoned pool, for steps over Sequences with logits of every position."""

    def __init__(
        self, model: Model, kernels: Kernels, *, num_blocks: int = 64, block_size: int = 16
    ) -> None:
        config = model.config
        self.model = model
        self.block_size = block_size
        self.kv_cache: KVCache = kernels.allocate_kv_cache(
            num_layers=config.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        for block_id in range(num_blocks):
            self.kv_cache.fill_block(block_id, float("nan"))  # nothing stale may shine through
        self.arena = kernels.make_arena()

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute the next `num_new` positions of each (sequence, num_new), in one batch."""
        self.arena.reset()
        batch = naive_batch([seq.part(num_new) for seq, num_new in work], self.block_size)
        logits = self.model.forward(batch, self.kv_cache, self.arena).logits
        for index, (seq, num_new) in enumerate(work):
            rows = logits[batch.query_start_loc[index] : batch.query_start_loc[index + 1]].copy()
            seq.logits = rows if seq.logits is None else np.concatenate([seq.logits, rows])
            seq.num_computed += num_new


def alone_and_whole(model: Model, kernels: Kernels, token_ids: list[int]) -> np.ndarray:
    """Logits [T, V] of one sequence, alone in one step: what every other way must equal."""
    drive = Drive(model, kernels)
    seq = Sequence(token_ids, list(range(-(-len(token_ids) // drive.block_size))))
    drive.step([(seq, len(token_ids))])
    assert seq.logits is not None
    return seq.logits
