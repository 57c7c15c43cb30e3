"""The Llama forward pass as the papers define it: float64, whole sequence, no cache, no fusion.

Shares no line with octavo.models, so that both can't be wrong in the same way by accident.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.checkpoint import ModelConfig


def dense_logits(
    config: ModelConfig, tensors: dict[str, np.ndarray], token_ids: list[int]
) -> np.ndarray:
    """Logits [T, V] float64 after each token of one sequence."""
    weight = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = weight["model.embed_tokens.weight"][token_ids]  # [T, H]
    for i in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in weight.items()
            if name.startswith(f"model.layers.{i}.")
        }
        x = x + _attention(config, layer, _norm(x, layer["input_layernorm.weight"], config))
        x = x + _mlp(layer, _norm(x, layer["post_attention_layernorm.weight"], config))
    x = _norm(x, weight["model.norm.weight"], config)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return x @ weight[head].T


def _norm(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.rms_norm_eps)


def _attention(config: ModelConfig, layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    num_tokens, dim = len(x), config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    q, k, v = (x @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    causal = np.tril(np.ones((num_tokens, num_tokens), bool))
    heads = []
    for head in range(config.num_attention_heads):
        columns = slice(head * dim, (head + 1) * dim)
        kv_columns = slice(head // group * dim, (head // group + 1) * dim)
        query = np.stack([rotate(config, q[t, columns], t) for t in range(num_tokens)])
        key = np.stack([rotate(config, k[t, kv_columns], t) for t in range(num_tokens)])
        scores = np.where(causal, query @ key.T / math.sqrt(dim), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        heads.append(weights @ v[:, kv_columns])
    return np.concatenate(heads, axis=1) @ layer["self_attn.o_proj.weight"].T


def rotate(config: ModelConfig, x: np.ndarray, position: int) -> np.ndarray:
    """RoPE of one head [D] as the paper writes it: times a block-diagonal matrix of rotations.

    Pair i is (x[i], x[i + D / 2]), Hugging Face's order.
    """
    dim = config.head_dim
    matrix = np.zeros((dim, dim))
    for i in range(dim // 2):
        angle = position * _frequency(config, i)
        j = i + dim // 2
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[i, j], matrix[j, i] = -math.sin(angle), math.sin(angle)
    return matrix @ x


def _frequency(config: ModelConfig, i: int) -> float:
    frequency = 1.0 / config.rope_theta ** (2 * i / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "factors":
        return frequency / scaling.factors[i]
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _mlp(layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
