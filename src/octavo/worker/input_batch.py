"""From a plan to the flat arrays of one step.

The rows hold what lasts from step to step (known tokens, block tables); build() makes a step's
arrays of them with a fixed number of numpy calls, whatever the number of tokens.
"""

from __future__ import annotations

import numpy as np

from ..kernels.api import Array
from ..messages import NewRequest, ScheduledRequest, SchedulerOutput
from ..models.batch import ForwardBatch


class InputBatch:
    """Persistent state of max_num_seqs rows; a row is taken over by the next NewRequest."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        max_num_blocks = -(-max_model_len // block_size)
        # One more: a prompt may fill it all to be scored, and a token comes of that as well.
        # Zero pages become resident when written: a row costs what its longest request used.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        """Known tokens of each row: prompt, and what was generated."""
        self.block_table = np.full((max_num_seqs, max_num_blocks), -1, np.int32)
        """[max_num_seqs, max_num_blocks] for all layers alike (R23, R24); -1 past the end."""
        self.num_blocks = np.zeros(max_num_seqs, np.int32)

    def start(self, new: NewRequest) -> None:
        """Give row new.row to a request that starts or resumes; what was there is gone."""
        row, count = new.row, len(new.token_ids)
        assert count <= self.max_model_len, "the scheduler admits no request past max_model_len"
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.block_table[row, : self.num_blocks[row]] = -1
        self.num_blocks[row] = 0

    def append(self, row: int, token_id: int) -> None:
        """A token was sampled for `row`: it is computed in a later step."""
        count = self.num_tokens[row]
        assert count <= self.max_model_len, "a request ends at max_model_len at the latest"
        self.token_ids[row, count] = token_id
        self.num_tokens[row] = count + 1

    def build(self, plan: SchedulerOutput) -> ForwardBatch:
        """The arrays of one step: requests in the order of the plan, all of them int32.

        All logits of sampled rows are wanted, as far as is known here.
        """
        self._append_blocks(plan.scheduled)
        columns = np.array(
            [(s.row, s.num_computed_tokens, s.num_new_tokens, s.samples) for s in plan.scheduled],
            dtype=np.int32,
        )
        rows, num_computed, num_new, samples = columns.T  # [B] each
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(num_new, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        seq_lens = num_computed + num_new
        self._check(rows, seq_lens, samples)
        assert num_tokens == plan.num_scheduled_tokens, "both sides count for themselves"

        # Token t belongs to request r(t), and stands where r's computed tokens end, and on.
        first_positions = np.repeat(num_computed - query_start_loc[:-1], num_new)  # [T]
        positions = np.arange(num_tokens, dtype=np.int32) + first_positions
        rows_of_tokens = np.repeat(rows, num_new)
        block_ids = self.block_table[rows_of_tokens, positions // self.block_size]
        assert block_ids.min() >= 0, "a token was scheduled without a block for it"
        logits_indices = query_start_loc[1:][samples.astype(bool)] - 1
        return ForwardBatch(
            input_ids=self.token_ids[rows_of_tokens, positions],
            positions=positions,
            slot_mapping=block_ids * self.block_size + positions % self.block_size,  # (R26)
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self.block_table[rows, : self.num_blocks[rows].max()],
            logits_indices=logits_indices,
            argmax_only=np.zeros(len(logits_indices), np.int32),
            sampled_positions=positions[logits_indices],
            sampled_start_loc=np.concatenate(([0], np.cumsum(samples))).astype(np.int32),
        )

    def _append_blocks(self, scheduled: tuple[ScheduledRequest, ...]) -> None:
        for request in scheduled:
            if request.new_block_ids:
                begin = self.num_blocks[request.row]
                end = begin + len(request.new_block_ids)
                self.block_table[request.row, begin:end] = request.new_block_ids
                self.num_blocks[request.row] = end

    def _check(self, rows: Array, seq_lens: Array, samples: Array) -> None:
        """Scheduler and worker each know how far a row is, and must agree."""
        known = self.num_tokens[rows]
        assert (seq_lens <= known).all(), "a position was scheduled whose token is not known"
        assert ((seq_lens == known) == samples.astype(bool)).all(), (
            "exactly the rows that reach their newest token sample (R63)"
        )
