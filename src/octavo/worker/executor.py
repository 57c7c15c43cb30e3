"""The line between who decides and who computes: all that the engine knows of the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..messages import KeptRun, ModelCosts, SchedulerOutput, StepResult, TierUse


class Executor(Protocol):
    """Computes the steps that a scheduler plans."""

    num_kv_blocks: int
    """Blocks in the KV pool."""
    num_tier_slots: tuple[int, int]
    """Room for blocks below the pool: in RAM, in a file."""
    max_model_len: int
    """Longest request in tokens, prompt and output together."""
    vocab_size: int
    costs: ModelCosts

    def submit(self, plan: SchedulerOutput) -> Any:
        """Start a step; on the CPU it computes at once. Returns a handle for collect()."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a submitted step; steps are collected in the order of submission."""
        ...

    def describe(self) -> dict[str, str]:
        """For the start-up report: backend, dtype, memory of weights and KV pool, ..."""
        ...

    def tier_use(self) -> TierUse | None:
        """How full the tiers are; from any thread. None: closed."""
        ...

    def save_prefixes(self, path: str, runs: Sequence[KeptRun], go_on: Callable[[], bool]) -> None:
        """Write cached runs to a file that replaces what was there, at once or not at all. Raises
        OSError, and Postponed once `go_on` says no."""
        ...

    def load_prefixes(self, path: str) -> list[KeptRun]:
        """Read such a file into the first slots of the tiers; nothing if it can't be trusted."""
        ...

    def close(self) -> None:
        """Give back memory and threads."""
        ...
