"""The Llama family (Llama 2 and 3, SmolLM2, TinyLlama), over the op table.

    input_ids [T] -> embedding -> residual [T, H]
    each layer:  norm -> attention -> add to residual, norm -> MLP -> (added by the next norm)
    gather the sampled rows [S, H] -> add, norm -> LM head -> logits [S, V], or their argmax [S]

In the last layer rows that nobody samples leave K and V and no more: nothing reads the rest (R64).
Every f(x) is added to the residual stream by the norm that follows it (R55, R56), so the stream
is read and written once for each. Dimensions are named as in kernels/api.py; T rows of all
requests lie one after the other, and only attention knows where one request ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checkpoint import ModelConfig, Weights
from ..kernels.api import Arena, Array, HeadOutput, Kernels, KVCache, Linear
from .batch import ExtraRows, ForwardBatch
from .layers import WeightLoader, build_cos_sin_cache


class LlamaLayer(NamedTuple):
    """Weights of one decoder layer; no biases anywhere (R59)."""

    input_norm: Array  # [H]
    qkv_proj: tuple[Linear, ...]  # [(NH + 2 KH) D, H], or [NH D, H] and [2 KH D, H]
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
    activation: Array  # [T, I]


EXTRA_ROWS = 64
"""Extra rows that go through the LM head together."""


class LlamaForCausalLM:
    """One model in memory. Stateless between steps: all that lasts is in the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        *,
        max_model_len: int,
        prune_last_layer: bool = True,
    ) -> None:
        """Loads and packs all weights. Raises ModelLoadError if they don't fit `config`.

        prune_last_layer: whether its queries, attention and MLP are for sampled rows only (R64).
        """
        self.config = config
        self.prune_last_layer = prune_last_layer
        self.kernels = kernels
        self.cos_sin_cache = build_cos_sin_cache(config, max_model_len)
        load = WeightLoader(weights, kernels)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed_tokens = load.linear(("model.embed_tokens.weight", vocab), in_features=hidden)
        last = config.num_hidden_layers - 1
        self.layers = [
            _load_layer(load, config, i, queries_apart=prune_last_layer and i == last)
            for i in range(config.num_hidden_layers)
        ]
        self.norm = load.vector("model.norm.weight", hidden)
        if config.tie_word_embeddings:
            self.lm_head = self.embed_tokens  # one packed array for both
        else:
            self.lm_head = load.linear(("lm_head.weight", vocab), in_features=hidden)
        self.weight_bytes = load.nbytes

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        arena: Arena,
        *,
        extra: ExtraRows | None = None,
    ) -> HeadOutput:
        """Of the rows in batch.logits_indices, as argmax_only says; valid until arena.reset().

        Writes the K/V of all T tokens into kv_cache. A step that samples nothing (S = 0, chunks
        of unfinished prompts; R63) ends before the LM head. With `extra`, all layers are whole.
        """
        scratch = self._scratch(len(batch.input_ids), arena)
        self.kernels.embedding(batch.input_ids, self.embed_tokens, scratch.residual)
        prune = self.prune_last_layer and batch.sampled_start_loc is not None and extra is None
        for index, layer in enumerate(self.layers[:-1] if prune else self.layers):
            self._norm_into_hidden(scratch, layer.input_norm, first=index == 0)
            self._attention(layer, index, batch=batch, kv_cache=kv_cache, scratch=scratch)
            self._norm_into_hidden(scratch, layer.post_attention_norm, first=False)
            self._mlp(layer, scratch)
        if extra is not None:
            self._visit(extra, scratch, arena)
        num_rows = len(batch.logits_indices)
        sampled = self._scratch(num_rows, arena)
        logits = arena.empty((num_rows, self.config.vocab_size), np.float32)
        best = arena.empty((num_rows,), np.int32)
        if prune:
            self._last_layer(batch, kv_cache, scratch, sampled)
        elif num_rows:
            self.kernels.gather_rows(scratch.residual, batch.logits_indices, sampled.residual)
            self.kernels.gather_rows(scratch.delta, batch.logits_indices, sampled.delta)
        if num_rows:  # the last add and norm, then the LM head: S rows instead of T (R61)
            self._norm_into_hidden(sampled, self.norm, first=False)
            self.kernels.lm_head(sampled.hidden, self.lm_head, batch.argmax_only, logits, best)
        return HeadOutput(logits, best)

    def _visit(self, extra: ExtraRows, scratch: Scratch, arena: Arena) -> None:
        """Logits of the extra rows, EXTRA_ROWS at a time, always in the same memory (R62)."""
        size = min(len(extra.indices), EXTRA_ROWS)
        memory = self._scratch(size, arena)
        logits = arena.empty((size, self.config.vocab_size), np.float32)
        for first in range(0, len(extra.indices), EXTRA_ROWS):
            indices = extra.indices[first : first + EXTRA_ROWS]
            rows = Scratch(*(array[: len(indices)] for array in memory))
            self.kernels.gather_rows(scratch.residual, indices, rows.residual)
            self.kernels.gather_rows(scratch.delta, indices, rows.delta)
            self._norm_into_hidden(rows, self.norm, first=False)
            self.kernels.linear(rows.hidden, self.lm_head, logits[: len(indices)])
            extra.take(first, logits[: len(indices)])

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
        kernels = self.kernels
        column = 0
        for part in layer.qkv_proj:
            columns = slice(column, column + part.out_features)
            kernels.linear(scratch.hidden, part, scratch.qkv[:, columns])
            column += part.out_features
        query, key, value = self._heads(scratch)
        kernels.rotary_embedding(batch.positions, query, key, self.cos_sin_cache)
        kernels.reshape_and_cache(key, value, kv_cache, index, batch.slot_mapping)
        kernels.paged_attention(
            query,
            kv_cache,
            index,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            self.config.head_dim**-0.5,
            scratch.attention,
        )
        kernels.linear(scratch.attention, layer.o_proj, scratch.delta)

    def _heads(self, scratch: Scratch) -> tuple[Array, Array, Array]:
        """qkv [T, (NH + 2 KH) D], split by column into [T, NH, D], [T, KH, D] and [T, KH, D]."""
        num_heads, num_kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        heads = scratch.qkv.reshape(len(scratch.qkv), -1, self.config.head_dim)
        end = num_heads + num_kv_heads
        return heads[:, :num_heads], heads[:, num_heads:end], heads[:, end:]

    def _last_layer(
        self, batch: ForwardBatch, kv_cache: KVCache, scratch: Scratch, sampled: Scratch
    ) -> None:
        """K and V of all T rows; the rest for the sampled rows alone, as a decode step (R64, R65).

        Leaves what _attention and _mlp would leave in the sampled rows in `sampled`.
        """
        kernels, index = self.kernels, len(self.layers) - 1
        layer = self.layers[index]
        q_proj, kv_proj = layer.qkv_proj
        query_size = q_proj.out_features
        _, key, value = self._heads(scratch)
        self._norm_into_hidden(scratch, layer.input_norm, first=index == 0)
        kernels.linear(scratch.hidden, kv_proj, scratch.qkv[:, query_size:])
        kernels.rotary_embedding(batch.positions, key, key[:, :0], self.cos_sin_cache)
        kernels.reshape_and_cache(key, value, kv_cache, index, batch.slot_mapping)
        if len(batch.logits_indices) == 0:
            return
        assert batch.sampled_positions is not None
        assert batch.sampled_start_loc is not None
        query, _, _ = self._heads(sampled)
        kernels.gather_rows(scratch.residual, batch.logits_indices, sampled.residual)
        kernels.gather_rows(scratch.hidden, batch.logits_indices, sampled.hidden)
        kernels.linear(sampled.hidden, q_proj, sampled.qkv[:, :query_size])
        kernels.rotary_embedding(batch.sampled_positions, query, query[:, :0], self.cos_sin_cache)
        kernels.paged_attention(
            query,
            kv_cache,
            index,
            batch.block_table,
            batch.sampled_start_loc,
            batch.seq_lens,
            self.config.head_dim**-0.5,
            sampled.attention,
        )
        kernels.linear(sampled.attention, layer.o_proj, sampled.delta)
        self._norm_into_hidden(sampled, layer.post_attention_norm, first=False)
        self._mlp(layer, sampled)

    def _mlp(self, layer: LlamaLayer, scratch: Scratch) -> None:
        """delta = down(silu(gate(hidden)) * up(hidden)) (R59)."""
        activation = scratch.activation  # [T, I]
        self.kernels.linear_silu_and_mul(scratch.hidden, layer.gate_up_proj, activation)
        self.kernels.linear(activation, layer.down_proj, scratch.delta)

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
            activation=arena.empty((num_tokens, config.intermediate_size), dtype),
        )


def _load_layer(
    load: WeightLoader, config: ModelConfig, index: int, *, queries_apart: bool
) -> LlamaLayer:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    query = (attention + "q_proj.weight", query_size)
    key_value = (attention + "k_proj.weight", kv_size), (attention + "v_proj.weight", kv_size)
    stacks = ((query,), key_value) if queries_apart else ((query, *key_value),)
    return LlamaLayer(
        input_norm=load.vector(prefix + "input_layernorm.weight", hidden),
        qkv_proj=tuple(load.linear(*stack, in_features=hidden) for stack in stacks),
        o_proj=load.linear((attention + "o_proj.weight", hidden), in_features=query_size),
        post_attention_norm=load.vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up_proj=load.linear(
            (mlp + "gate_proj.weight", inner), (mlp + "up_proj.weight", inner), in_features=hidden
        ),
        down_proj=load.linear((mlp + "down_proj.weight", hidden), in_features=inner),
    )
