"""The Llama family (Llama 2 and 3, SmolLM2, TinyLlama), over the op table.

    input_ids [T] -> embedding -> residual [T, H]
    each layer:  norm -> attention -> add to residual, norm -> MLP -> (added by the next norm)
    gather the sampled rows [S, H] -> add, norm -> LM head -> logits [S, V]

Every f(x) is added to the residual stream by the norm that follows it (R55, R56), so the stream
is read and written once for each. Dimensions are named as in kernels/api.py; T rows of all
requests lie one after the other, and only attention knows where one request ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checkpoint import ModelConfig, Weights
from ..kernels.api import Arena, Array, Kernels, KVCache, Linear
from .batch import ForwardBatch
from .layers import WeightLoader, build_cos_sin_cache


class LlamaLayer(NamedTuple):
    """Weights of one decoder layer; no biases anywhere (R59)."""

    input_norm: Array  # [H]
    qkv_proj: Linear  # [(NH + 2 KH) D, H]
    o_proj: Linear  # [H, NH D]
    post_attention_norm: Array  # [H]
    gate_up_proj: Linear  # [2 I, H]
    down_proj: Linear  # [H, I]


class Scratch(NamedTuple):
    """Memory of one step, shared by all layers; taken from the arena in one place."""

    residual: Array  # [T, H] float32: the residual stream
    delta: Array  # [T, H] float32: what attention or MLP adds to it
    hidden: Array  # [T, H]: normalised
    qkv: Array  # [T, (NH + 2 KH) D] float32
    attention: Array  # [T, NH D]
    gate_up: Array  # [T, 2 I]
    activation: Array  # [T, I]


class LlamaForCausalLM:
    """One model in memory. Stateless between steps: all that lasts is in the KV cache."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, *, max_model_len: int
    ) -> None:
        """Loads and packs all weights. Raises ModelLoadError if they don't fit `config`."""
        self.config = config
        self.kernels = kernels
        self.cos_sin_cache = build_cos_sin_cache(config, max_model_len)
        load = WeightLoader(weights, kernels)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed_tokens = load.linear(("model.embed_tokens.weight", vocab), in_features=hidden)
        self.layers = [_load_layer(load, config, i) for i in range(config.num_hidden_layers)]
        self.norm = load.vector("model.norm.weight", hidden)
        if config.tie_word_embeddings:
            self.lm_head = self.embed_tokens  # one packed array for both
        else:
            self.lm_head = load.linear(("lm_head.weight", vocab), in_features=hidden)
        self.weight_bytes = load.nbytes

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, arena: Arena) -> Array:
        """Logits [S, V] float32 of the rows in batch.logits_indices; valid until arena.reset().

        Writes the K/V of all T tokens into kv_cache. A step that samples nothing (S = 0, chunks
        of unfinished prompts; R63) ends before the LM head.
        """
        scratch = self._scratch(len(batch.input_ids), arena)
        self.kernels.embedding(batch.input_ids, self.embed_tokens, scratch.residual)
        for index, layer in enumerate(self.layers):
            self._norm_into_hidden(scratch, layer.input_norm, first=index == 0)
            self._attention(layer, index, batch=batch, kv_cache=kv_cache, scratch=scratch)
            self._norm_into_hidden(scratch, layer.post_attention_norm, first=False)
            self._mlp(layer, scratch)
        return self._logits(batch.logits_indices, scratch, arena)

    def _norm_into_hidden(self, scratch: Scratch, weight: Array, *, first: bool) -> None:
        """residual += delta, hidden = norm(residual); at the very first there is no delta."""
        residual, hidden, eps = scratch.residual, scratch.hidden, self.config.rms_norm_eps
        if first:
            self.kernels.rms_norm(residual, weight, eps, hidden)
        else:
            self.kernels.fused_add_rms_norm(scratch.delta, residual, weight, eps, hidden)

    def _attention(
        self,
        layer: LlamaLayer,
        index: int,
        *,
        batch: ForwardBatch,
        kv_cache: KVCache,
        scratch: Scratch,
    ) -> None:
        """delta = o_proj(attention(rotary(qkv_proj(hidden)))), K/V by way of the cache (R38)."""
        kernels, config = self.kernels, self.config
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = config.head_dim
        kernels.linear(scratch.hidden, layer.qkv_proj, scratch.qkv)
        # [T, (NH + 2 KH) D] -> [T, NH + 2 KH, D], split by column into [T, NH, D], 2 x [T, KH, D]
        heads = scratch.qkv.reshape(-1, num_heads + 2 * num_kv_heads, head_dim)
        query = heads[:, :num_heads]
        key = heads[:, num_heads : num_heads + num_kv_heads]
        value = heads[:, num_heads + num_kv_heads :]
        kernels.rotary_embedding(batch.positions, query, key, self.cos_sin_cache)
        kernels.reshape_and_cache(key, value, kv_cache, index, batch.slot_mapping)
        kernels.paged_attention(
            query,
            kv_cache,
            index,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            head_dim**-0.5,
            scratch.attention,
        )
        kernels.linear(scratch.attention, layer.o_proj, scratch.delta)

    def _mlp(self, layer: LlamaLayer, scratch: Scratch) -> None:
        """delta = down(silu(gate(hidden)) * up(hidden)) (R59)."""
        kernels = self.kernels
        kernels.linear(scratch.hidden, layer.gate_up_proj, scratch.gate_up)  # [T, 2 I]
        kernels.silu_and_mul(scratch.gate_up, scratch.activation)  # [T, I]
        kernels.linear(scratch.activation, layer.down_proj, scratch.delta)

    def _logits(self, indices: Array, scratch: Scratch, arena: Arena) -> Array:
        """Gather first, then the last add and norm, then the LM head: S rows instead of T (R61)."""
        kernels, config = self.kernels, self.config
        num_rows = len(indices)
        logits = arena.empty((num_rows, config.vocab_size), np.float32)
        if num_rows == 0:
            return logits
        shape = (num_rows, config.hidden_size)
        residual, delta = arena.empty(shape, np.float32), arena.empty(shape, np.float32)
        hidden = arena.empty(shape, kernels.dtype)
        kernels.gather_rows(scratch.residual, indices, residual)
        kernels.gather_rows(scratch.delta, indices, delta)
        kernels.fused_add_rms_norm(delta, residual, self.norm, config.rms_norm_eps, hidden)
        kernels.linear(hidden, self.lm_head, logits)
        return logits

    def _scratch(self, num_tokens: int, arena: Arena) -> Scratch:
        config, dtype = self.config, self.kernels.dtype
        query_size = config.num_attention_heads * config.head_dim
        qkv_size = query_size + 2 * config.num_key_value_heads * config.head_dim
        return Scratch(
            residual=arena.empty((num_tokens, config.hidden_size), np.float32),
            delta=arena.empty((num_tokens, config.hidden_size), np.float32),
            hidden=arena.empty((num_tokens, config.hidden_size), dtype),
            qkv=arena.empty((num_tokens, qkv_size), np.float32),
            attention=arena.empty((num_tokens, query_size), dtype),
            gate_up=arena.empty((num_tokens, 2 * config.intermediate_size), dtype),
            activation=arena.empty((num_tokens, config.intermediate_size), dtype),
        )


def _load_layer(load: WeightLoader, config: ModelConfig, index: int) -> LlamaLayer:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    return LlamaLayer(
        input_norm=load.vector(prefix + "input_layernorm.weight", hidden),
        qkv_proj=load.linear(
            (attention + "q_proj.weight", query_size),
            (attention + "k_proj.weight", kv_size),
            (attention + "v_proj.weight", kv_size),
            in_features=hidden,
        ),
        o_proj=load.linear((attention + "o_proj.weight", hidden), in_features=query_size),
        post_attention_norm=load.vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up_proj=load.linear(
            (mlp + "gate_proj.weight", inner), (mlp + "up_proj.weight", inner), in_features=hidden
        ),
        down_proj=load.linear((mlp + "down_proj.weight", hidden), in_features=inner),
    )
