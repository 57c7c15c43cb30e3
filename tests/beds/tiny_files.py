"""Tiny Llama checkpoints on disk: the same weights as a GGUF file and as a Hugging Face folder.

Two layers, hidden 64, 4 heads over 2 KV heads of 16, intermediate 96, and a byte-level BPE of 300
entries with ChatML's specials. Written with the field's own libraries (gguf, safetensors), never
with Octavo's readers, so a test that reads a file back proves something.

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = write_tiny_hf(tmp_path / "tiny")
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 96
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 16
MAX_POSITIONS = 512
ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-5

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Byte-level BPE merges, best first: each side is a byte or the result of an earlier merge.
MERGES = (
    "Ġ t|h e|Ġ a|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|o u|n d|i s|o r|e n|Ġ o|in g|Ġ i|e s|Ġ f|Ġa nd|"
    "i t|Ġ b|e d|Ġo f|Ġ c|a l|Ġ m|Ġt o|a r|l l|Ġ h|Ġi s|o w|Ġ d|Ġ p|l o|c h|Ġw h|Ġ y"
)


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of GPT-2's byte-level BPE, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def tiny_merges() -> list[str]:
    """Merges as "left right", without repeats."""
    return list(dict.fromkeys(MERGES.split("|")))


def tiny_tokens() -> list[str]:
    """Token texts by id: specials, the 256 bytes, then one token per merge."""
    merged = [merge.replace(" ", "") for merge in tiny_merges()]
    return [*SPECIALS, *byte_alphabet(), *merged]


VOCAB_SIZE = len(tiny_tokens())


def tiny_tokenizer_json() -> str:
    """The text of tokenizer.json; digits are split one by one, as SmolLM does."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {"id": token_id, "content": text, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False, "special": True}
        for token_id, text in enumerate(SPECIALS)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {text: token_id for token_id, text in enumerate(tiny_tokens())},
        "merges": tiny_merges(),
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    byte_level | {"use_regex": True},
                ],
            },
            "post_processor": None,
            "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
            "model": model,
        },
        ensure_ascii=False,
    )


def tiny_config(*, tied: bool = True, **overrides: Any) -> dict[str, Any]:
    """The content of config.json; an override of None drops the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    config.update(overrides)
    return {key: value for key, value in config.items() if value is not None}


def tiny_weights(*, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face name, q and k rows in Hugging Face order.

    Values are rounded to bfloat16, so a checkpoint in float32, float16 or bfloat16 holds the same.
    """
    rng = np.random.default_rng(seed)

    def linear(rows: int, columns: int) -> np.ndarray:
        return _to_bfloat16_grid(rng.standard_normal((rows, columns)) / np.sqrt(columns))

    def norm() -> np.ndarray:
        return _to_bfloat16_grid(1 + 0.1 * rng.standard_normal(HIDDEN_SIZE))

    # An embedding of deviation 0.3 gives a tied head logits of deviation about 2.4: no ties, no
    # certainty, so greedy and sampled tokens both vary.
    weights = {
        "model.embed_tokens.weight": _to_bfloat16_grid(
            0.3 * rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE))
        )
    }
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": norm(),
            at + "self_attn.q_proj.weight": linear(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
            at + "self_attn.k_proj.weight": linear(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            at + "self_attn.v_proj.weight": linear(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            at + "self_attn.o_proj.weight": linear(HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
            at + "post_attention_layernorm.weight": norm(),
            at + "mlp.gate_proj.weight": linear(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            at + "mlp.up_proj.weight": linear(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            at + "mlp.down_proj.weight": linear(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    weights["model.norm.weight"] = norm()
    if not tied:
        weights["lm_head.weight"] = 2.4 * linear(VOCAB_SIZE, HIDDEN_SIZE)
        weights["lm_head.weight"] = _to_bfloat16_grid(weights["lm_head.weight"])
    return weights


def _to_bfloat16_grid(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """The name that a llama GGUF gives to a tensor of this Hugging Face name."""
    if name.startswith("model.layers."):
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[rest]}"
    return GGUF_NAMES[name]


def interleave_rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama GGUFs keep q and k: row 2i + j of a head is Hugging Face's row j * half + i."""
    head_dim = weight.shape[0] // num_heads
    half = head_dim // 2
    order = [
        head * head_dim + j * half + i
        for head in range(num_heads)
        for i in range(half)
        for j in (0, 1)
    ]
    return weight[order]


def write_tiny_gguf(
    path: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    weight_type: str = "F32",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write the tiny model as a GGUF file.

    weight_type  ggml type of the matrices (norms stay F32): F32, F16, BF16, Q8_0, Q4_0, ...
    metadata     added or replacing keys, whole names; a value of None leaves the key out
    drop, extra  tensors left out or added, under the names of GGUF
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_gguf_metadata(architecture) | (metadata or {})).items():
        _add_value(writer, key, value)
    heads = {"attn_q.weight": NUM_HEADS, "attn_k.weight": NUM_KV_HEADS}
    for hf_name, weight in tiny_weights(tied=tied, seed=seed).items():
        name = gguf_name(hf_name)
        if name in drop:
            continue
        num_heads = heads.get(name.split(".", 2)[-1])
        stored = interleave_rope_rows(weight, num_heads) if num_heads else weight
        kind = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else weight_type]
        writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_metadata(architecture: str) -> dict[str, Any]:
    kinds = [3 if token in SPECIALS else 1 for token in tiny_tokens()]  # 3 control, 1 normal
    sizes = {
        "block_count": NUM_LAYERS,
        "context_length": MAX_POSITIONS,
        "embedding_length": HIDDEN_SIZE,
        "feed_forward_length": INTERMEDIATE_SIZE,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "rope.freq_base": ROPE_THETA,
        "attention.layer_norm_rms_epsilon": RMS_NORM_EPS,
    }
    tokenizer = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tiny_tokens(),
        "token_type": kinds,
        "merges": tiny_merges(),
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "unknown_token_id": UNK_ID,
        "padding_token_id": EOS_ID,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    return {
        "general.name": "Tiny llama",
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_tiny_hf(
    folder: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    config: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write the tiny model as a folder in Hugging Face form.

    dtype        float32, float16 or bfloat16
    num_shards   more than 1 writes model-0000i-of-0000n.safetensors and the index
    config       keys of config.json added or replaced; None leaves a key out
    drop, extra  tensors left out or added, under the names of Hugging Face
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(tied=tied, seed=seed) | (extra or {})
    stored = {
        name: weight.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        for name, weight in weights.items()
        if name not in drop
    }
    _write_safetensors(folder, stored, num_shards)
    documents = {
        "config.json": tiny_config(tied=tied, **(config or {})),
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": SPECIALS[BOS_ID],
            "eos_token": SPECIALS[EOS_ID],
            "unk_token": SPECIALS[UNK_ID],
            "pad_token": SPECIALS[EOS_ID],
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    return folder


def _write_safetensors(folder: Path, stored: dict[str, np.ndarray], num_shards: int) -> None:
    if num_shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {name: files[i % num_shards] for i, name in enumerate(stored)}
    for file in files:
        part = {name: stored[name] for name in stored if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
