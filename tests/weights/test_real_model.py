"""The default model's file: header, pinned checksum, and its tensors against the gguf package."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.weights.fetch import cached_file
from octavo.weights.gguf_checkpoint import open_gguf
from octavo.weights.sources import ALIASES

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model_path() -> Path:
    named = os.environ.get("OCTAVO_TEST_MODEL")
    path = Path(named) if named else cached_file(ALIASES["smollm2-135m"])
    assert path is not None, "run `make setup` to fetch the model, or set OCTAVO_TEST_MODEL"
    return path


def test_the_file_is_the_pinned_one(model_path: Path) -> None:
    pinned = ALIASES["smollm2-135m"]
    assert model_path.stat().st_size == pinned.file_bytes
    with model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == pinned.file_sha256


def test_sizes_tokens_and_ends_are_those_of_smollm2(model_path: Path) -> None:
    checkpoint = open_gguf(model_path, "smollm2-135m")
    config = checkpoint.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.intermediate_size, config.max_position_embeddings) == (1536, 8192)
    assert (config.rope_theta, config.rms_norm_eps, config.rope_scaling) == (1e5, 1e-5, None)
    assert config.tie_word_embeddings
    assert checkpoint.generation.eos_token_ids == (2,)
    tokens = checkpoint.tokenizer.gguf["tokenizer.ggml.tokens"]
    assert len(tokens) == 49152
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(checkpoint.tokenizer.gguf["tokenizer.ggml.merges"]) == 48900
    assert "<|im_start|>" in (checkpoint.tokenizer.chat_template or "")


@pytest.mark.slow
def test_tensors_equal_the_gguf_packages_decoding(model_path: Path) -> None:
    """One matrix that is interleaved, one that is not, a norm, and rows of the Q8_0 embedding."""
    weights = open_gguf(model_path, "smollm2-135m").weights
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(model_path).tensors}

    def by_gguf(name: str) -> np.ndarray:
        return gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)

    layer = "model.layers.29."
    down = weights.load(layer + "mlp.down_proj.weight")
    assert np.array_equal(down, by_gguf("blk.29.ffn_down.weight"))
    key = by_gguf("blk.29.attn_k.weight").reshape(3, 32, 2, 576)
    halves = np.concatenate([key[:, :, 0], key[:, :, 1]], axis=1).reshape(192, 576)
    assert np.array_equal(weights.load(layer + "self_attn.k_proj.weight"), halves)
    embedding = weights.load("model.embed_tokens.weight")
    assert np.array_equal(embedding, by_gguf("token_embd.weight"))
