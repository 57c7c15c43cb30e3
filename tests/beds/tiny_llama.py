"""Llamas small enough to compute in a blink: random weights in memory, as a Checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.checkpoint import (
    Checkpoint,
    GenerationDefaults,
    ModelConfig,
    RopeScaling,
    StoredRows,
    TokenizerSpec,
)
from octavo.errors import ModelLoadError

TIED = ModelConfig(
    architecture="llama",
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=96,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    name="tiny-llama",
)

VARIANTS: dict[str, ModelConfig] = {
    "tied": TIED,
    "untied": replace(TIED, tie_word_embeddings=False),
    "linear_rope": replace(TIED, rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "llama3_rope": replace(
        TIED,
        rope_theta=500.0,
        rope_scaling=RopeScaling(
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "factors_rope": replace(
        TIED,
        rope_scaling=RopeScaling(kind="factors", factors=(1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 8.0)),
    ),
    "odd_sizes": replace(  # no size a multiple of a vector; heads don't add up to hidden
        TIED,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        vocab_size=97,
        tie_word_embeddings=False,
    ),
}


class TinyWeights:
    """Fills the Weights protocol from a dict of float32 arrays, and remembers what was read."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.loaded: list[str] = []

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ModelLoadError(f"tensor {name} is missing")
        return self.tensors[name].shape

    def load(self, name: str, *, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(self.shape(name), np.float32) if out is None else out
        self.loaded.append(name)
        out[:] = self.tensors[name]
        return out

    def load_stored(self, name: str, kinds: frozenset[str]) -> StoredRows | None:
        self.shape(name)
        return None

    def release(self) -> None:
        pass


def make_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names, scaled so that each stage has a say."""
    rng = np.random.default_rng(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (1.5 * rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": 2 * matrix(config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        tensors[layer + "input_layernorm.weight"] = norm()
        tensors[layer + "self_attn.q_proj.weight"] = matrix(query_size, hidden)
        tensors[layer + "self_attn.k_proj.weight"] = matrix(kv_size, hidden)
        tensors[layer + "self_attn.v_proj.weight"] = matrix(kv_size, hidden)
        tensors[layer + "self_attn.o_proj.weight"] = matrix(hidden, query_size)
        tensors[layer + "post_attention_layernorm.weight"] = norm()
        tensors[layer + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[layer + "mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[layer + "mlp.down_proj.weight"] = matrix(hidden, inner)
    tensors["model.norm.weight"] = norm()
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = 2 * matrix(config.vocab_size, hidden)
    return tensors


def make_checkpoint(
    variant: str | ModelConfig = "tied", tensors: dict[str, np.ndarray] | None = None
) -> Checkpoint:
    """A tiny Llama by the name of its variant, or of a configuration."""
    config = VARIANTS[variant] if isinstance(variant, str) else variant
    return Checkpoint(
        path=Path("tiny-llama"),
        name="tiny-llama",
        config=config,
        weights=TinyWeights(make_tensors(config) if tensors is None else tensors),
        tokenizer=TokenizerSpec(kind="gguf"),
        generation=GenerationDefaults(eos_token_ids=(0,)),
    )
