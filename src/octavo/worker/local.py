"""The executor in this process: a step is computed when it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..messages import KeptRun, ModelCosts, SchedulerOutput, StepResult, TierUse
from ..sampling import processors
from ..sampling_params import SamplingParams
from .model_runner import ModelRunner
from .prefix_file import load_prefixes, save_prefixes


class LocalExecutor:
    """Fills worker/executor.py's protocol; the handle of a step is its result."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_model_len: int,
        report: dict[str, str],
        fingerprint: Callable[[], str],
    ) -> None:
        self._runner: ModelRunner | None = runner
        self._report = report
        self._fingerprint = fingerprint
        self.num_kv_blocks = runner.kv_cache.num_blocks
        self.num_tier_slots = runner.tiers.num_slots
        self.max_model_len = max_model_len
        shape = runner.model.config
        self.vocab_size = shape.vocab_size
        self.costs = ModelCosts(runner.kv_cache.block_nbytes, 2 * shape.num_layer_weights)

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

    def tier_use(self) -> TierUse | None:
        """How full the tiers are; from any thread. None: closed."""
        return None if self._runner is None else self._runner.tiers.use()

    def save_prefixes(self, path: str, runs: Sequence[KeptRun], go_on: Callable[[], bool]) -> None:
        """Write cached runs to a file, whole or not at all."""
        assert self._runner is not None, "closed"
        save_prefixes(path, runs, self._fingerprint(), self._runner.tiers, go_on=go_on)

    def load_prefixes(self, path: str) -> list[KeptRun]:
        """Runs of a file, their blocks in the tiers; none, and a line in the log, if it is not
        whole or not of this model and backend."""
        assert self._runner is not None, "closed"
        return load_prefixes(path, self._fingerprint(), self._runner.tiers)

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError for logits processors that are unknown or set wrongly."""
        processors.make(params, (), num_prompt=0, seed=0)

    def close(self) -> None:
        """Give back weights, pool, tiers and scratch memory; no step can be submitted any more."""
        if self._runner is not None:
            self._runner.tiers.close()
        self._runner = None
