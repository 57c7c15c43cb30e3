"""One step: plan -> flat arrays -> logits of the sampled rows -> tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..kernels.api import Arena, Array, KVCache
from ..messages import NewRequest, RowFault, SampledToken, SchedulerOutput, StepResult
from ..models.registry import Model
from .input_batch import InputBatch

if TYPE_CHECKING:
    from ..models.batch import ForwardBatch
    from ..sampling.state import RowState


class Sampler(Protocol):
    """What a step asks of octavo.sampling.sampler.Sampler."""

    def sample(self, logits: Array, rows: Sequence[RowState]) -> list[SampledToken | RowFault]:
        """One outcome for each row of logits [S, V] float32, which may be overwritten."""
        ...


class ModelRunner:
    """Runs steps in order; holds what each row needs from one step to the next."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        arena: Arena,
        input_batch: InputBatch,
        *,
        sampler: Sampler,
        new_row_state: Callable[[NewRequest], RowState],
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.arena = arena
        self.input_batch = input_batch
        self.sampler = sampler
        self.new_row_state = new_row_state
        self.row_states: dict[int, RowState | RowFault] = {}
        """By row; a RowFault where a request's state could not even be built."""

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute one step. A row that fails is reported in `faults`, and the rest go on."""
        for new in plan.starts:
            self.input_batch.start(new)
            self.row_states[new.row] = self._start(new)
        if not plan.scheduled:
            return StepResult(plan.step, ())
        self.arena.reset()
        batch = self.input_batch.build(plan)
        rows = [s.row for s in plan.scheduled if s.samples]
        outcomes = self._sample(batch, [self.row_states[row] for row in rows])
        sampled = tuple(o for o in outcomes if isinstance(o, SampledToken))
        for token in sampled:
            self.input_batch.append(token.row, token.token_id)
            state = self.row_states[token.row]
            assert not isinstance(state, RowFault)
            state.append(token.token_id)
        faults = tuple(o for o in outcomes if isinstance(o, RowFault))
        return StepResult(plan.step, sampled, faults)

    def _start(self, new: NewRequest) -> RowState | RowFault:
        try:
            return self.new_row_state(new)
        except Exception as error:
            return RowFault(new.row, f"starting the request failed: {_text(error)}")

    def _sample(
        self, batch: ForwardBatch, states: list[RowState | RowFault]
    ) -> list[SampledToken | RowFault]:
        """One outcome for each sampled row, in order. `states` are those of the S rows."""
        logits = self.model.forward(batch, self.kv_cache, self.arena)
        healthy = [state for state in states if not isinstance(state, RowFault)]
        if len(healthy) == len(states):
            if not healthy:
                return []
            try:
                return self.sampler.sample(logits, healthy)
            except Exception:
                # Some row broke the sampler, which may have overwritten the logits by then. The
                # same step over again gives the same bits; now each row is sampled by itself.
                logits = self.model.forward(batch, self.kv_cache, self.arena)
        return [
            state if isinstance(state, RowFault) else self._sample_one(logits[i : i + 1], state)
            for i, state in enumerate(states)
        ]

    def _sample_one(self, logits: Array, state: RowState) -> SampledToken | RowFault:
        try:
            return self.sampler.sample(logits, [state])[0]
        except Exception as error:
            return RowFault(state.row, f"sampling failed: {_text(error)}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
