"""What a Llama checkpoint must contain, checked by name and shape before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import inf
from pathlib import Path

from ..checkpoint import ModelConfig, Weights
from ..errors import ModelLoadError

logger = logging.getLogger("octavo")

MAX_LISTED = 3
"""Problems that an error text lists; a file with more is the wrong file."""
MAX_SIZE = 1 << 24
"""Largest believable vocabulary, width or length; real ones stay far below."""

IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
"""Left in old checkpoints; computed from rope_theta instead."""
ARITHMETIC_ENDINGS = (".bias", "q_norm.weight", "k_norm.weight")
"""Tensors that would change every result: a model that has them is no plain Llama."""


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that a Llama of this shape needs, in file order."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (q_size, hidden)
        yield at + "self_attn.k_proj.weight", (kv_size, hidden)
        yield at + "self_attn.v_proj.weight", (kv_size, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, q_size)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.gate_proj.weight", (intermediate, hidden)
        yield at + "mlp.up_proj.weight", (intermediate, hidden)
        yield at + "mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def check_config(config: ModelConfig, path: Path) -> None:
    """Raise ModelLoadError unless the sizes fit each other and are within reason."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    for name, size in sizes.items():
        if not 1 <= size <= MAX_SIZE:
            raise ModelLoadError(f"{path}: {name} is {size}, but must be 1 to {MAX_SIZE}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelLoadError(
            f"{path}: {heads} attention heads can't share {kv_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"{path}: head_dim is {config.head_dim}, but rotary pairs need even")
    if not (0 < config.rope_theta < inf and 0 < config.rms_norm_eps < inf):
        raise ModelLoadError(
            f"{path}: rope_theta {config.rope_theta} and rms_norm_eps {config.rms_norm_eps} must "
            "be finite and above zero"
        )


def check_tensors(config: ModelConfig, weights: Weights, path: Path) -> None:
    """Hold the file's tensors against the expected ones, without reading any.

    Raises ModelLoadError that lists the missing and misshapen ones, or those that this
    architecture does not have and that would change its results; logs a warning for other
    tensors that nothing will use.
    """
    present = set(weights.names())
    expected: set[str] = set()
    problems: list[str] = []
    for name, shape in expected_tensors(config):
        expected.add(name)
        if name not in present:
            problems.append(f"{name} {list(shape)} is missing")
        elif weights.shape(name) != shape:
            found = list(weights.shape(name))
            problems.append(f"{name} has shape {found}, expected {list(shape)}")
        if len(problems) > MAX_LISTED:
            break
    if problems:
        listed = "; ".join(problems[:MAX_LISTED])
        more = "; and more" if len(problems) > MAX_LISTED else ""
        raise ModelLoadError(f"{path}: the weights don't match the model's sizes: {listed}{more}")
    _judge_extra(present - expected - {"lm_head.weight"}, config.num_hidden_layers, path)


def _judge_extra(extra: set[str], num_layers: int, path: Path) -> None:
    """`extra` has no lm_head: with tied embeddings a head in the file is a copy of them."""
    unknown = sorted(name for name in extra if not name.endswith(IGNORED_ENDINGS))
    changing = [name for name in unknown if name.endswith(ARITHMETIC_ENDINGS)]
    if changing:
        raise ModelLoadError(
            f"{path}: has {_listed(changing)}: biases and query/key norms are not supported, and "
            "leaving them out would give wrong answers"
        )
    beyond = [name for name in unknown if (index := _layer_of(name)) and index >= num_layers]
    if beyond:
        raise ModelLoadError(
            f"{path}: has {_listed(beyond)}, but the model says that it has {num_layers} layers: "
            "one of the two is wrong"
        )
    if unknown:
        logger.warning("%s: tensors that Octavo does not use: %s", path, _listed(unknown))


def _layer_of(name: str) -> int | None:
    parts = name.split(".", 3)
    return int(parts[2]) if name.startswith("model.layers.") and parts[2].isdigit() else None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
