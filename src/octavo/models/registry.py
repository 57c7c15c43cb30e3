"""Architectures by name; each is one file, imported only when asked for."""

from __future__ import annotations

from typing import Protocol

from ..checkpoint import Checkpoint, ModelConfig
from ..errors import ModelLoadError
from ..kernels.api import Arena, Array, HeadOutput, Kernels, KVCache
from .batch import ExtraRows, ForwardBatch


class Model(Protocol):
    """What the worker asks of a model."""

    config: ModelConfig
    weight_bytes: int
    cos_sin_cache: Array

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        arena: Arena,
        *,
        extra: ExtraRows | None = None,
    ) -> HeadOutput:
        """Of the rows in batch.logits_indices, as argmax_only says; valid until arena.reset().
        Those of extra rows go to extra.take()."""
        ...


ARCHITECTURES = ("llama",)


def build_model(
    checkpoint: Checkpoint, kernels: Kernels, *, max_model_len: int, prune_last_layer: bool = True
) -> Model:
    """Load a checkpoint's weights into a model. Raises ModelLoadError for what it can't run.

    prune_last_layer: no more than K and V of the last layer for rows that are not sampled (R64).
    """
    config = checkpoint.config
    if config.architecture == "llama":
        from .llama import LlamaForCausalLM

        return LlamaForCausalLM(
            config,
            checkpoint.weights,
            kernels,
            max_model_len=max_model_len,
            prune_last_layer=prune_last_layer,
        )
    raise ModelLoadError(
        f"{checkpoint.name} is of the architecture {config.architecture!r}; "
        f"supported: {', '.join(ARCHITECTURES)}"
    )
