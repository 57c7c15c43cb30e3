"""Log probabilities of prompt tokens: which rows of a step they come from, and collecting them.

The token at position p + 1 is scored by the logits of position p, so the prompt's tokens 1 to the
last come from its positions 0 to the last but one, in whichever steps those are computed (C44).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..kernels.api import Array
from ..messages import NewRequest, PromptLogprobs, RowFault, SchedulerOutput, TokenLogprobs
from ..models.batch import ExtraRows, ForwardBatch

Score = Callable[[Array, Sequence[int], Sequence[int]], list[TokenLogprobs | None]]
"""(logits [n, V], token ids, numbers of alternatives) -> log probabilities; as Sampler.score."""


class PromptScores:
    """Knows which rows still want prompt logprobs."""

    def __init__(self, score: Score, token_ids: Array) -> None:
        """token_ids [max_num_seqs, max_model_len]: the known tokens of each row, kept current."""
        self._score = score
        self._token_ids = token_ids
        self._wanted: dict[int, NewRequest] = {}

    def start(self, new: NewRequest) -> None:
        """A request took over its row; after a preemption it may have some scores already."""
        self._wanted.pop(new.row, None)
        num_missing = new.num_prompt_tokens - 1 - new.num_prompt_logprobs
        if new.params.prompt_logprobs is not None and num_missing > 0:
            self._wanted[new.row] = new

    def of_step(self, plan: SchedulerOutput, batch: ForwardBatch) -> StepScores | None:
        """The collector for a step; None if none of its rows wants any."""
        if not self._wanted:
            return None
        scores = StepScores(self._score)
        for entry, start in zip(plan.scheduled, batch.query_start_loc.tolist(), strict=False):
            new = self._wanted.get(entry.row)
            if new is None:
                continue
            begin = max(entry.num_computed_tokens, new.num_prompt_logprobs)
            last = new.num_prompt_tokens - 1
            end = min(entry.num_computed_tokens + entry.num_new_tokens, last)
            if end == last:
                del self._wanted[entry.row]
            token_ids = self._token_ids[entry.row, begin + 1 : end + 1].tolist()
            scores.want(new, start + begin - entry.num_computed_tokens, token_ids)
        return scores


class StepScores:
    """Scores the extra rows of one step as their logits come."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._rows: list[tuple[int, int, int, int]] = []
        """(index in the step, row, token id, alternatives) of each extra row."""
        self._scores: dict[int, list[TokenLogprobs]] = {}
        self._faults: dict[int, RowFault] = {}

    def want(self, new: NewRequest, index: int, token_ids: list[int]) -> None:
        """The step's rows from `index` on score token_ids, in order."""
        num_top = new.params.prompt_logprobs or 0
        for offset, token_id in enumerate(token_ids):
            self._rows.append((index + offset, new.row, token_id, num_top))

    @property
    def extra(self) -> ExtraRows:
        """What the model is asked for."""
        return ExtraRows(np.array([index for index, *_ in self._rows], np.int32), self._take)

    def _take(self, first: int, logits: Array) -> None:
        _, rows, token_ids, num_tops = zip(*self._rows[first : first + len(logits)], strict=True)
        scores: list[TokenLogprobs | None] = [None] * len(rows)
        text = "the model's logits are all NaN or -inf in the prompt"
        try:
            scores = self._score(logits, token_ids, num_tops)
        except Exception as error:  # whatever it is, other requests go on
            text = f"scoring the prompt failed: {type(error).__name__}: {error}"
        for row, score in zip(rows, scores, strict=True):
            if score is None:
                self._faults[row] = RowFault(row, text)
            else:
                self._scores.setdefault(row, []).append(score)

    def results(self) -> tuple[tuple[PromptLogprobs, ...], tuple[RowFault, ...]]:
        """Scores by row, and the rows that failed."""
        scores = (PromptLogprobs(row, tuple(found)) for row, found in self._scores.items())
        return tuple(scores), tuple(self._faults.values())
