"""What a model file says about itself, whatever its format: the leaf types of a checkpoint.

weights/ fills these in; models/ reads ModelConfig and Weights, engine/ reads the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

    kind: str
    """linear, llama3 or factors (a divisor per frequency, as a GGUF's rope_freqs tensor has)."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()
    """[rotary_dim / 2] divisors, for kind "factors"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder of the Llama family, under Hugging Face's names."""

    architecture: str
    """Key into models/registry.py: "llama"."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    name: str = ""

    @property
    def num_layer_weights(self) -> int:
        """Weights of all matrices in the layers; embeddings and head are not counted."""
        num_heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        rows = num_heads * self.head_dim + 3 * self.intermediate_size
        return self.num_hidden_layers * rows * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """All that a tokenizer is built from: a tokenizer.json, or the metadata of a GGUF file."""

    kind: str
    """tokenizer.json or gguf."""

    tokenizer_json: str = ""
    """The text of tokenizer.json."""

    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json (with special_tokens_map.json folded in), or {}."""

    gguf: dict[str, Any] = field(default_factory=dict)
    """Metadata under "tokenizer." of a GGUF file, keys whole (tokenizer.ggml.tokens, ...)."""

    chat_template: str | None = None
    """Jinja source, wherever the checkpoint keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """generation_config.json, or what a GGUF says: defaults that a request overrides."""

    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a generation."""

    sampling: dict[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty, where the checkpoint names them."""

    def __post_init__(self) -> None:
        # A checkpoint may say 40.0; top_k is a count, and SamplingParams insists on it.
        if "top_k" in self.sampling:
            counted = {**self.sampling, "top_k": int(self.sampling["top_k"])}
            object.__setattr__(self, "sampling", counted)


class StoredRows(NamedTuple):
    """Rows of a weight as a model file holds them, not dequantised."""

    kind: str  # ggml's name: Q8_0, Q4_1, ...
    rows: np.ndarray  # [out_features, bytes of a row] uint8


class Weights(Protocol):
    """Tensors by Hugging Face name ("model.layers.0.self_attn.q_proj.weight").

    Linear weights are [out_features, in_features]; q and k rows are in Hugging Face order
    (rotary halves, not interleaved pairs) whatever the file has.
    """

    def names(self) -> tuple[str, ...]:
        """Names of all tensors in the file, mapped."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it. Raises ModelLoadError if it is missing."""
        ...

    def load(self, name: str, *, out: np.ndarray | None = None) -> np.ndarray:
        """One tensor as float32 (C order), dequantised into `out` if given (of that shape).

        Raises ModelLoadError if it is missing.
        """
        ...

    def load_stored(self, name: str, kinds: frozenset[str]) -> StoredRows | None:
        """One weight as it is stored, or None if that is in none of the formats `kinds`.

        Rows are in the same order as those of `load`, a view that is read soon and dropped.
        Raises ModelLoadError if it is missing.
        """
        ...

    def release(self) -> None:
        """Let go of the file's pages that were read; they come back where they are needed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model found and opened: nothing large is read until Weights.load."""

    path: Path
    name: str
    """Served name: the alias or hub id asked for, else the file or folder name."""

    config: ModelConfig
    weights: Weights
    tokenizer: TokenizerSpec
    generation: GenerationDefaults
