"""The executor in this process: a step is computed when it is submitted."""

from __future__ import annotations

from ..messages import SchedulerOutput, StepResult
from ..sampling import processors
from ..sampling_params import SamplingParams
from .model_runner import ModelRunner


class LocalExecutor:
    """Fills worker/executor.py's protocol; the handle of a step is its result."""

    def __init__(self, runner: ModelRunner, *, max_model_len: int, report: dict[str, str]) -> None:
        self._runner: ModelRunner | None = runner
        self._report = report
        self.num_kv_blocks = runner.kv_cache.num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = runner.model.config.vocab_size

    def submit(self, plan: SchedulerOutput) -> StepResult:
        """Compute a step now. Returns the handle for collect()."""
        assert self._runner is not None, "closed"
        return self._runner.run(plan)

    def collect(self, handle: StepResult) -> StepResult:
        """The result of a submitted step."""
        return handle

    def describe(self) -> dict[str, str]:
        """For the start-up report: backend, dtype, memory of weights and KV pool, ..."""
        return dict(self._report)

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError for logits processors that are unknown or set wrongly."""
        processors.make(params, (), num_prompt=0, seed=0)

    def close(self) -> None:
        """Give back weights, pool and scratch memory; no step can be submitted any more."""
        self._runner = None
