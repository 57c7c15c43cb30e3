"""A GGUF file of the llama architecture as a Checkpoint, under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import (
    Checkpoint,
    GenerationDefaults,
    ModelConfig,
    RopeScaling,
    StoredRows,
    TokenizerSpec,
)
from ..errors import ModelLoadError
from .expected import check_config, check_tensors, expected_tensors
from .gguf import GGUFFile

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FREQS = "rope_freqs.weight"

MUST_BE_UNSET = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)
"""Keys under "llama." that change the arithmetic in a way that plain Llama does not have."""

TURN_ENDINGS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
"""Control tokens that end a turn even where a file's ids do not say so, as older files don't."""

SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def open_gguf(path: Path, name: str) -> Checkpoint:
    """Open a GGUF file; no tensor but rope_freqs is read.

    Raises ModelLoadError for a damaged file, an architecture other than llama, a tensor that is
    missing, misshapen or stored in a format that is not read, or a feature that is not supported.
    """
    file = GGUFFile(path)
    metadata = _Metadata(file)
    config = _model_config(file, metadata)
    check_config(config, path)
    weights = GGUFWeights(file, config)
    check_tensors(config, weights, path)
    for tensor, _ in expected_tensors(config):
        file.check_readable(weights.stored_name(tensor))
    return Checkpoint(
        path=path,
        name=name,
        config=config,
        weights=weights,
        tokenizer=_tokenizer_spec(metadata, config.vocab_size),
        generation=_generation_defaults(metadata),
    )


class GGUFWeights:
    """Weights protocol over a GGUF file; load may be called from several threads."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._stored = {
            hugging_face_name(name): name for name in file.tensors if name != ROPE_FREQS
        }
        self._interleaved = {
            "self_attn.q_proj.weight": config.num_attention_heads,
            "self_attn.k_proj.weight": config.num_key_value_heads,
        }

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self.stored_name(name)].shape

    def load(self, name: str, *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        heads = self._interleaved.get(name.split(".", 3)[-1], 0)
        return self._file.load(self.stored_name(name), num_interleaved_heads=heads, out=out)

    def load_stored(self, name: str, kinds: frozenset[str]) -> StoredRows | None:
        heads = self._interleaved.get(name.split(".", 3)[-1], 0)
        return self._file.load_stored(self.stored_name(name), kinds, num_interleaved_heads=heads)

    def release(self) -> None:
        self._file.release()

    def stored_name(self, name: str) -> str:
        """The file's own name for a tensor. Raises ModelLoadError if it has none."""
        if name not in self._stored:
            raise ModelLoadError(f"{self._file.path}: there is no tensor {name}")
        return self._stored[name]


def hugging_face_name(name: str) -> str:
    """Hugging Face's name for a tensor of a llama GGUF; a name we don't know stays as it is."""
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        return TOP_NAMES.get(name, name)
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


class _Metadata:
    """Typed look-ups: a value of the wrong type is the file's fault, and says so."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.values: Mapping[str, Any] = file.metadata

    def _get(self, key: str, kinds: tuple[type, ...], wanted: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.path}: the metadata lacks {key}")
        if type(value) not in kinds:
            raise ModelLoadError(f"{self.path}: {key} is {_shortened(value)}, but must be {wanted}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, (int,), "one whole number", default))

    def real(self, key: str, default: float | None = None) -> float:
        """A number; one kept as float32 comes back as written, 1e-05 and not 9.99999975e-06."""
        value = float(self._get(key, (int, float), "one number", default))
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, (str,), "text", default))

    def array(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        values: list[Any] = self._get(key, (list,), "an array", default)
        if not all(type(value) is kind for value in values):
            raise ModelLoadError(
                f"{self.path}: {key} must be an array of {kind.__name__}, but holds "
                f"{type(values[0]).__name__}"
            )
        return values


def _shortened(value: object) -> str:
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_config(file: GGUFFile, metadata: _Metadata) -> ModelConfig:
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(
            f"{file.path}: the architecture is {architecture!r}; Octavo runs the Llama family "
            "(GGUF architecture 'llama': Llama 2 and 3, SmolLM2, TinyLlama)"
        )
    for key in MUST_BE_UNSET:
        if metadata.real(f"llama.{key}", 0.0):
            raise ModelLoadError(f"{file.path}: llama.{key} is set, which is not supported")
    hidden_size = metadata.integer("llama.embedding_length")
    num_heads = metadata.integer("llama.attention.head_count")
    head_dim = metadata.integer("llama.attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        size = metadata.integer(f"llama.{key}", head_dim)
        if size != head_dim:
            raise ModelLoadError(
                f"{file.path}: llama.{key} is {size}, which is only supported equal to the head "
                f"size of {head_dim}"
            )
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path}: the tensor token_embd.weight is missing")
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden_size,
        intermediate_size=metadata.integer("llama.feed_forward_length"),
        num_hidden_layers=metadata.integer("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=metadata.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_position_embeddings=metadata.integer("llama.context_length"),
        rms_norm_eps=metadata.real("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.real("llama.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, metadata, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        name=metadata.text("general.name", ""),
    )


def _rope_scaling(file: GGUFFile, metadata: _Metadata, head_dim: int) -> RopeScaling | None:
    """Linear scaling by key, divisors by the tensor rope_freqs.weight, or both at once."""
    # Files written before rope.scaling.* existed have the factor under rope.scale_linear.
    old_factor = metadata.real("llama.rope.scale_linear", 1.0)
    kind = metadata.text("llama.rope.scaling.type", "linear" if old_factor != 1.0 else "none")
    if kind not in ("none", "linear"):
        raise ModelLoadError(
            f"{file.path}: rope scaling {kind!r} is not supported (linear and Llama 3's are)"
        )
    factor = metadata.real("llama.rope.scaling.factor", old_factor) if kind == "linear" else 1.0
    if not factor > 0:
        raise ModelLoadError(f"{file.path}: the rope scaling factor is {factor}, not above zero")
    if ROPE_FREQS in file.tensors:
        shape = file.tensors[ROPE_FREQS].shape
        if shape != (head_dim // 2,):
            raise ModelLoadError(
                f"{file.path}: {ROPE_FREQS} has shape {list(shape)}, expected {[head_dim // 2]}"
            )
        divisors = file.load(ROPE_FREQS) * np.float32(factor)
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise ModelLoadError(f"{file.path}: {ROPE_FREQS} holds values that are not above zero")
        return RopeScaling(kind="factors", factors=tuple(divisors.tolist()))
    return RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None


def _tokenizer_spec(metadata: _Metadata, vocab_size: int) -> TokenizerSpec:
    """The "tokenizer." keys; the types of the arrays are checked, since all else builds on them."""
    tokens = metadata.array("tokenizer.ggml.tokens", str)
    if len(tokens) > vocab_size:
        raise ModelLoadError(
            f"{metadata.path}: {len(tokens)} tokens, but the embedding has only {vocab_size} rows"
        )
    metadata.array("tokenizer.ggml.merges", str, [])
    for key, kind in (("tokenizer.ggml.token_type", int), ("tokenizer.ggml.scores", float)):
        values = metadata.array(key, kind, [])
        if values and len(values) != len(tokens):
            raise ModelLoadError(
                f"{metadata.path}: {key} has {len(values)} entries for {len(tokens)} tokens"
            )
    return TokenizerSpec(
        kind="gguf",
        gguf={key: value for key, value in metadata.values.items() if key.startswith("tokenizer.")},
        chat_template=metadata.text("tokenizer.chat_template", "") or None,
    )


def _generation_defaults(metadata: _Metadata) -> GenerationDefaults:
    tokens = metadata.array("tokenizer.ggml.tokens", str)
    ids = []
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata.values:
            continue
        ids.append(metadata.integer(key))
        if not 0 <= ids[-1] < len(tokens):
            raise ModelLoadError(f"{metadata.path}: {key} is {ids[-1]}, which is no token's id")
    kinds = metadata.array("tokenizer.ggml.token_type", int, [])
    control = 3
    ids += [i for i, kind in enumerate(kinds) if kind == control and tokens[i] in TURN_ENDINGS]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ids)),
        sampling={
            name: metadata.real(key)
            for key, name in SAMPLING_KEYS.items()
            if key in metadata.values
        },
    )
