"""One step: plan -> flat arrays -> logits of the sampled rows -> tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..kernels.api import Arena, Array, Forward, HeadOutput
from ..messages import (
    NewRequest,
    RowFault,
    SampledToken,
    SchedulerOutput,
    StepResult,
    Timing,
    TokenLogprobs,
)
from ..models.registry import Model
from .input_batch import InputBatch
from .prompt_scores import PromptScores
from .tiers import Tiers

if TYPE_CHECKING:
    from ..sampling.state import RowState


class Sampler(Protocol):
    """What a step asks of octavo.sampling.sampler.Sampler."""

    def sample(
        self, logits: Array, rows: Sequence[RowState], best: Array
    ) -> list[SampledToken | RowFault]:
        """One outcome for each row of logits [S, V] float32, which may be overwritten, or of
        best [S] (HeadOutput). A row that fails for whatever reason is a RowFault, never an
        exception."""
        ...

    def score(
        self, logits: Array, token_ids: Sequence[int], num_tops: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Raw log probabilities of prompt tokens [n] after logits [n, V], which may be
        overwritten; None where the logits are no numbers."""
        ...


class ModelRunner:
    """Runs steps in order; holds what each row needs from one step to the next."""

    def __init__(
        self,
        model: Model,
        tiers: Tiers,
        arena: Arena,
        input_batch: InputBatch,
        *,
        sampler: Sampler,
        new_row_state: Callable[[NewRequest], RowState],
        forward: Forward | None = None,
    ) -> None:
        """forward: an equal of model.forward that runs instead of it."""
        self.model = model
        self.forward: Forward = forward or model.forward
        self.tiers = tiers
        self.kv_cache = tiers.kv_cache
        self.arena = arena
        self.input_batch = input_batch
        self.sampler = sampler
        self.new_row_state = new_row_state
        self.row_states: dict[int, RowState | RowFault] = {}
        """By row; a RowFault where a request's state could not even be built."""
        self.prompt_scores = PromptScores(
            lambda *args: self.sampler.score(*args), input_batch.token_ids
        )

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute one step. A row that fails is reported in `faults`, and the rest go on."""
        lost, moved = self.tiers.move(plan.transfers) if plan.transfers else (set[int](), ())
        for new in plan.starts:
            self.input_batch.start(new)
            self.row_states[new.row] = self._start(new)
            self.prompt_scores.start(new)
        for row, token_ids in plan.forced:
            for token_id in token_ids:
                self._append(self.row_states[row], token_id)
        if not plan.scheduled:
            return StepResult(plan.step, (), timing=Timing(0, 0, moved) if moved else None)
        start = perf_counter()
        self.arena.reset()
        states = [self.row_states[s.row] for s in plan.scheduled if s.samples]
        batch = self.input_batch.build(plan)._replace(argmax_only=_argmax_only(states))
        scores = self.prompt_scores.of_step(plan, batch)
        if scores is None:
            found = self.forward(batch, self.kv_cache, self.arena)
        else:
            found = self.model.forward(batch, self.kv_cache, self.arena, extra=scores.extra)
        for row, mask in plan.masks:
            state = self.row_states[row]
            if not isinstance(state, RowFault):
                state.mask = mask
        sampled, faults = self._sample(found, states)
        compute_us = round((perf_counter() - start) * 1e6)
        timing = Timing(plan.num_scheduled_tokens, compute_us, moved)
        prompt_logprobs, unscored = ((), ()) if scores is None else scores.results()
        failed = {fault.row: fault for fault in (*unscored, *faults)}
        for scheduled in plan.scheduled if lost else ():
            if not lost.isdisjoint(scheduled.new_block_ids):
                text = "K/V of this request could not be read back from the tier that kept them"
                failed[scheduled.row] = RowFault(scheduled.row, text, retry=True)
                sampled = tuple(token for token in sampled if token.row != scheduled.row)
        faults = tuple(failed.values())
        return StepResult(plan.step, sampled, faults, prompt_logprobs, timing)

    def _start(self, new: NewRequest) -> RowState | RowFault:
        try:
            return self.new_row_state(new)
        except Exception as error:  # whatever it is, the other requests go on
            text = f"starting the request failed: {type(error).__name__}: {error}"
            return RowFault(new.row, text)

    def _sample(
        self, found: HeadOutput, states: list[RowState | RowFault]
    ) -> tuple[tuple[SampledToken, ...], tuple[RowFault, ...]]:
        """Sample what was found for the rows of `states`, and take note of the tokens."""
        faults = [state for state in states if isinstance(state, RowFault)]
        healthy = [state for state in states if not isinstance(state, RowFault)]
        if faults:
            kept = [not isinstance(state, RowFault) for state in states]
            found = HeadOutput(*(array[kept] for array in found))
        sampled: list[SampledToken] = []
        outcomes = self.sampler.sample(found.logits, healthy, found.best) if healthy else []
        for state, outcome in zip(healthy, outcomes, strict=True):
            if isinstance(outcome, RowFault):
                faults.append(outcome)
                continue
            sampled.append(outcome)
            self._append(state, outcome.token_id)
        return tuple(sampled), tuple(faults)

    def _append(self, state: RowState | RowFault, token_id: int) -> None:
        """A row knows one token more."""
        assert not isinstance(state, RowFault), "a row that never began goes on"
        state.append(token_id)
        self.input_batch.append(state.row, token_id)


def _argmax_only(states: Sequence[RowState | RowFault]) -> Array:
    """[S] int32, as ForwardBatch has it; of a row that failed already nothing is wanted."""
    only = [isinstance(state, RowFault) or state.takes_argmax for state in states]
    return np.array(only, np.int32)
