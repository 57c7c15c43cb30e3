"""Record what transformers says about SmolLM2, as the fixture that tests/oracle compares with.

Run once, in an environment of its own that has torch, transformers, tokenizers and gguf:

    OMP_NUM_THREADS=1 python tools/record_oracle.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

The oracle shares nothing with Octavo but the file: weights are dequantised by the gguf package,
computed in float32 by transformers' Llama, and token ids come from a `tokenizers` BPE built here.
transformers' own GGUF import is not used: it loses rope_theta, rms_norm_eps and the splitting of
digits, so the config is built from the metadata and the q/k rows are put back in order by hand.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGUFReader, dequantize
from oracle_prompts import LONG_TEXT, SYSTEM_CHAT, TEXTS
from tokenizers import AddedToken, decoders, models, pre_tokenizers

NUM_OUTPUT_TOKENS = 64
NUM_TOP = 64
LONG_TOKENS = 600
FIXTURE = Path(__file__).parent.parent / "tests" / "fixtures" / "smollm2_oracle.json.gz"

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def metadata(reader: GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


def in_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection from interleaved pairs, as llama GGUFs have, to halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def build_model(reader: GGUFReader, meta: dict[str, Any]) -> transformers.LlamaForCausalLM:
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem, _, _ = tensor.name.rpartition(".weight")
        if stem == "token_embd":
            name = "model.embed_tokens.weight"
        elif stem == "output_norm":
            name = "model.norm.weight"
        else:
            _, layer, part = stem.split(".")
            if part in ("attn_q", "attn_k"):
                array = in_halves(array, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
        state[name] = torch.from_numpy(np.array(array))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    rope = model.model.rotary_emb.inv_freq
    assert abs(float(rope[1]) - meta["llama.rope.freq_base"] ** (-2 / config.head_dim)) < 1e-6
    return model


def build_tokenizer(meta: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def make_prompts(
    tokenizer: tokenizers.Tokenizer, meta: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """By name: the text or messages, and the token ids."""
    template = jinja2.Environment().from_string(meta["tokenizer.chat_template"])
    chat = template.render(messages=SYSTEM_CHAT, add_generation_prompt=True)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    prompts: dict[str, dict[str, Any]] = {
        name: {"text": text, "prompt_ids": ids(text)} for name, text in TEXTS.items()
    }
    long_ids = ids(LONG_TEXT)[:LONG_TOKENS]
    assert len(long_ids) == LONG_TOKENS, len(long_ids)
    long_text = tokenizer.decode(long_ids, skip_special_tokens=False)
    assert ids(long_text) == long_ids
    prompts["english_600"] = {"text": long_text, "prompt_ids": long_ids}
    prompts["chat_system"] = {"messages": SYSTEM_CHAT, "text": chat, "prompt_ids": ids(chat)}
    assert len(prompts) == 12
    assert len(prompts["one_token"]["prompt_ids"]) == 1
    return prompts


def greedy(model: transformers.LlamaForCausalLM, prompt_ids: list[int]) -> list[int]:
    """NUM_OUTPUT_TOKENS most likely tokens, on past an end-of-sequence token."""
    output: list[int] = []
    cache = None
    step = torch.tensor([prompt_ids])
    while len(output) < NUM_OUTPUT_TOKENS:
        result = model(step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        output.append(int(result.logits[0, -1].argmax()))
        step = torch.tensor([output[-1:]])
    return output


def record(model: transformers.LlamaForCausalLM, prompt_ids: list[int]) -> dict[str, Any]:
    output_ids = greedy(model, prompt_ids)
    logits = model(torch.tensor([prompt_ids + output_ids[:-1]])).logits[0].float()
    generated = logits[len(prompt_ids) - 1 :]
    assert generated.argmax(-1).tolist() == output_ids, "one pass and step by step disagree"
    logsumexp = torch.logsumexp(generated, -1)
    values, top_ids = torch.topk(generated, NUM_TOP)
    logprobs = values - logsumexp[:, None]
    entry: dict[str, Any] = {
        "output_ids": output_ids,
        "logsumexp": [round(float(x), 5) for x in logsumexp],
        "top_ids": top_ids.tolist(),
        "top_logprobs_e5": torch.round(logprobs * 1e5).int().tolist(),
    }
    if len(prompt_ids) == LONG_TOKENS:
        every = torch.log_softmax(logits[: len(prompt_ids) - 1], -1)
        following = every[torch.arange(len(prompt_ids) - 1), torch.tensor(prompt_ids[1:])]
        entry["prompt_logprobs_e5"] = torch.round(following * 1e5).int().tolist()
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    path = parser.parse_args().gguf
    torch.set_num_threads(1)
    reader = GGUFReader(path)
    meta = metadata(reader)
    model = build_model(reader, meta)
    prompts = make_prompts(build_tokenizer(meta), meta)
    with torch.inference_mode():
        for name, prompt in prompts.items():
            prompt.update(record(model, prompt["prompt_ids"]))
            gaps = [(a[0] - a[1]) / 1e5 for a in prompt["top_logprobs_e5"]]
            print(f"{name:16} {len(prompt['prompt_ids']):4} tokens, closest call {min(gaps):.5f}")
    versions = {m.__name__: m.__version__ for m in (torch, transformers, tokenizers, np)}
    fixture = {
        "about": "recorded by tools/record_oracle.py; logprobs in units of 1e-5 nats",
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": versions,
        "prompts": prompts,
    }
    text = json.dumps(fixture, ensure_ascii=False, separators=(",", ":"))
    FIXTURE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{FIXTURE}: {FIXTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
