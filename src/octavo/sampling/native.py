"""The sampler's whole-row work in a backend's own kernels: many rows in one call.

They choose as sampler.py does, and leave rows that they don't take (an infinite logit) to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..kernels.api import Array, SamplingKernels
from ..messages import RowFault, SampledToken, TokenLogprobs
from ..sampling_params import SamplingParams
from .sampler import Sampler, found_tokens, guarded
from .state import RowState
from .truncation import min_p_floor

_NOTHING: Array = np.empty(0, np.float32)


def _wants(params: SamplingParams, mode: str) -> bool:
    return params.logprobs is not None and params.logprobs_mode == mode


def _temperature(state: RowState) -> float:
    """What the kernels divide by: rows that plug-ins truncate were scaled before (_change)."""
    if state.params.greedy:
        return 0.0
    return 1.0 if state.truncates else state.params.temperature


def make_sampler(vocab_size: int, kernels: SamplingKernels | None) -> Sampler:
    """The sampler of a backend, with its kernels if it has any."""
    return Sampler(vocab_size) if kernels is None else NativeSampler(vocab_size, kernels)


class NativeSampler(Sampler):
    """The same sampler: what whole rows need is computed by a backend's kernels, many at once."""

    def __init__(self, vocab_size: int, kernels: SamplingKernels) -> None:
        super().__init__(vocab_size)
        self._kernels = kernels
        self._keep_masked = self._mask

    def sample(
        self, logits: Array, rows: Sequence[RowState], best: Array | None = None
    ) -> list[SampledToken | RowFault]:
        """As Sampler.sample."""
        results = found_tokens(rows, best)
        changed: dict[int, Array] = {}
        """Rows that were changed; the logits before, if their raw logprobs are wanted."""
        with np.errstate(all="ignore"):
            for i, state in enumerate(rows):
                if i not in results and state.changes_logits:
                    before = logits[i].copy() if _wants(state.params, "raw") else _NOTHING
                    outcome = guarded(self._change, logits[i], state)
                    if outcome is None:
                        changed[i] = before
                    else:
                        results[i] = outcome
            taken = [i for i in range(len(rows)) if i not in results]
            drawn = dict(zip(taken, self._draw_rows(logits, taken, rows), strict=True))
            for i in [i for i, token_id in drawn.items() if token_id < 0]:
                del drawn[i]
                results[i] = self._left_over(logits[i], rows[i], changed.get(i))
        found = self._found_logprobs(logits, drawn, rows, changed)
        for i, token_id in drawn.items():
            results[i] = SampledToken(rows[i].row, token_id, found.get(i))
        return [results[i] for i in range(len(rows))]

    def _change(self, logits: Array, state: RowState) -> SampledToken | None:
        """Step 2 on one row [V] in place; the whole of the sampling where an infinity leads it."""
        if not math.isfinite(np.max(logits)):
            return self._sample_row(logits, state)
        self._prepare(logits, state)
        best = int(logits.argmax())
        if not state.params.greedy and state.truncates and logits[best] > -np.inf:
            np.copyto(logits, self._scale(logits, best, state)[0])
        return None

    def _mask(self, logits: Array, mask: bytes) -> None:
        packed = np.frombuffer(mask, np.uint8)
        self._kernels.mask(logits[None], np.zeros(1, np.int32), packed[None])

    def score(
        self, logits: Array, token_ids: Sequence[int], num_tops: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """As Sampler.score."""
        count = len(logits)
        found = self._logprobs_of(
            logits, range(count), token_ids, num_tops=num_tops, named=[()] * count
        )
        for i in [i for i, one in enumerate(found) if one is None]:
            found[i : i + 1] = super().score(logits[i : i + 1], token_ids[i : i + 1], num_tops[i:])
        return found

    def _left_over(
        self, logits: Array, state: RowState, before: Array | None
    ) -> SampledToken | RowFault:
        """A row that the kernels left alone: an infinity leads it."""
        if before is None:
            return guarded(self._sample_row, logits, state)
        raw = self._logprobs(before) if before.size else None
        return guarded(lambda row, state: self._choose(row, state, raw), logits, state)

    def _draw_rows(
        self, logits: Array, taken: Sequence[int], rows: Sequence[RowState]
    ) -> list[int]:
        """Token ids of rows `taken` [R] of logits [S, V], after steps 3 to 8; -1: left alone."""
        states = [rows[i] for i in taken]
        params = [state.params for state in states]
        floors = [min_p_floor(p.min_p) if p.min_p > 0 else -np.inf for p in params]
        out = np.empty(len(taken), np.int32)
        self._kernels.sample(
            logits,
            np.array(taken, np.int32),
            np.array([_temperature(state) for state in states], np.float32),
            np.array(floors, np.float32),
            np.array([min(max(p.top_k, 0), self.vocab_size) for p in params], np.int32),
            np.array([p.top_p for p in params], np.float64),
            np.array([state.seed for state in states], np.uint64),
            np.array([state.position for state in states], np.int64),
            np.array([_wants(p, "processed") for p in params], np.uint8),
            out,
        )
        token_ids: list[int] = out.tolist()
        return token_ids

    def _found_logprobs(
        self,
        logits: Array,
        drawn: dict[int, int],
        rows: Sequence[RowState],
        changed: dict[int, Array],
    ) -> dict[int, TokenLogprobs | None]:
        """Of the drawn tokens of rows that ask, by row: of their logits as they are now, or raw
        ones of changed rows, as they were before."""
        asking = [i for i in drawn if rows[i].params.logprobs is not None]
        copies = [i for i in asking if changed.get(i, _NOTHING).size]
        plain = [i for i in asking if i not in copies]
        found: dict[int, TokenLogprobs | None] = {}
        for group, source, where in (
            (plain, logits, plain),
            (copies, [changed[i] for i in copies], list(range(len(copies)))),
        ):
            if group:
                params = [rows[i].params for i in group]
                results = self._logprobs_of(
                    np.asarray(source),
                    where,
                    [drawn[i] for i in group],
                    num_tops=[p.logprobs or 0 for p in params],
                    named=[p.logprob_token_ids for p in params],
                )
                found.update(zip(group, results, strict=True))
        return found

    def _logprobs_of(
        self,
        logits: Array,
        rows: Sequence[int],
        token_ids: Sequence[int],
        *,
        num_tops: Sequence[int],
        named: Sequence[tuple[int, ...]],
    ) -> list[TokenLogprobs | None]:
        """Of one token in each of rows [R] of logits [S, V]; None: left alone."""
        count, num_top = len(rows), min(max(num_tops), self.vocab_size)
        log_sum_exps, ranks = np.empty(count), np.empty(count, np.int32)
        top = np.empty((count, num_top), np.int32)
        ids, indices = np.array(token_ids, np.int32), np.array(rows, np.int32)
        self._kernels.logprobs(logits, indices, ids, log_sum_exps, ranks, top)
        found: list[TokenLogprobs | None] = []
        for i, (rank, norm) in enumerate(zip(ranks.tolist(), log_sum_exps.tolist(), strict=True)):
            if rank == 0:
                found.append(None)
                continue
            row, best = logits[rows[i]], top[i, : num_tops[i]].tolist()
            # The one formula for all of them: the same token has the same bits.
            own, *others = (float(row[j]) - norm for j in (token_ids[i], *best))
            asked = tuple((j, float(row[j]) - norm) for j in named[i] if j < row.size)
            found.append(TokenLogprobs(own, rank, tuple(zip(best, others, strict=True)), asked))
        return found
