"""A sampler for tests of the worker: the most likely token, faults on NaN, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.messages import NewRequest, RowFault, SampledToken


class GreedyState:
    """Stands for sampling.state.RowState: remembers what it was told."""

    def __init__(self, new: NewRequest) -> None:
        if new.seed == 666:
            raise ValueError("an unlucky seed")
        self.row = new.row
        self.request_id = new.request_id
        self.token_ids = list(new.token_ids)
        self.takes_argmax = new.row % 2 == 1

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)


class GreedySampler:
    """Stands for sampling.sampler.Sampler, and overwrites its logits as that may."""

    def sample(
        self, logits: np.ndarray, rows: Sequence[GreedyState], best: np.ndarray
    ) -> list[SampledToken | RowFault]:
        assert len(logits) == len(best) == len(rows)
        outcomes: list[SampledToken | RowFault] = []
        for row_logits, state, token_id in zip(logits, rows, best.tolist(), strict=True):
            if token_id >= 0:
                assert state.takes_argmax
                outcomes.append(SampledToken(state.row, token_id))
            elif not (row_logits > -np.inf).any():
                outcomes.append(RowFault(state.row, "no number among the logits"))
            else:
                outcomes.append(SampledToken(state.row, int(row_logits.argmax())))
            row_logits[...] = np.nan
        return outcomes
