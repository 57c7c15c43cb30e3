"""Loading weights: fused, tensor by tensor, and refusing what does not fit."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from beds.backends import TEST_BACKENDS, kernels_of
from beds.tiny_llama import TIED, TinyWeights, make_checkpoint, make_tensors
from octavo.errors import ModelLoadError
from octavo.kernels.reference import make_kernels
from octavo.models.llama import LlamaForCausalLM
from octavo.models.registry import build_model


@pytest.mark.parametrize("backend", TEST_BACKENDS)
def test_a_tied_head_shares_the_array_of_the_embedding(backend: str) -> None:
    tied = build_model(make_checkpoint("tied"), kernels_of(backend), max_model_len=256)
    untied = build_model(make_checkpoint("untied"), kernels_of(backend), max_model_len=256)
    assert isinstance(tied, LlamaForCausalLM)
    assert isinstance(untied, LlamaForCausalLM)
    assert tied.lm_head is tied.embed_tokens
    assert untied.lm_head is not untied.embed_tokens
    assert untied.weight_bytes - tied.weight_bytes == untied.lm_head.nbytes


@pytest.mark.parametrize("prune_last_layer", [False, True])
def test_fused_projections_equal_separate_ones(prune_last_layer: bool) -> None:
    """R38, R57: q, k, v and gate, up stacked along N give the columns of the separate products;
    so do q alone and k, v, as the last layer has them where it is pruned (R64)."""
    kernels = make_kernels()
    tensors = make_tensors(TIED)
    model = build_model(
        make_checkpoint("tied"), kernels, max_model_len=256, prune_last_layer=prune_last_layer
    )
    assert isinstance(model, LlamaForCausalLM)
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    layer = model.layers[1]
    for fused, module, names in (
        (layer.qkv_proj, "self_attn", ("q_proj", "k_proj", "v_proj")),
        ((layer.gate_up_proj,), "mlp", ("gate_proj", "up_proj")),
    ):
        separate = []
        for name in names:
            weight = tensors[f"model.layers.1.{module}.{name}.weight"]
            separate.append(np.empty((5, len(weight)), np.float32))
            kernels.linear(x, kernels.pack_linear(weight), separate[-1])
        together = [np.empty((5, part.out_features), np.float32) for part in fused]
        for part, out in zip(fused, together, strict=True):
            kernels.linear(x, part, out)
        np.testing.assert_array_equal(
            np.concatenate(together, axis=1), np.concatenate(separate, axis=1)
        )
    assert len(layer.qkv_proj) == 1 + prune_last_layer


def test_each_tensor_is_read_once_and_let_go() -> None:
    """Peak memory while loading stays below the packed weights and one unpacked tensor more."""
    config = replace(TIED, vocab_size=4000, num_hidden_layers=6, tie_word_embeddings=False)
    tensors = make_tensors(config)
    weights = TinyWeights(tensors)
    checkpoint = replace(make_checkpoint(config, tensors), weights=weights)
    tracemalloc.start()
    try:
        model = build_model(checkpoint, make_kernels(), max_model_len=16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(weights.loaded) == sorted(tensors)
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert peak < model.weight_bytes + largest + 100_000


def test_a_missing_tensor_is_named() -> None:
    tensors = make_tensors(TIED)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        build_model(make_checkpoint(TIED, tensors), make_kernels(), max_model_len=16)


def test_a_tensor_of_another_shape_is_named_with_both_shapes() -> None:
    tensors = make_tensors(TIED)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1]
    with pytest.raises(
        ModelLoadError, match=r"k_proj\.weight has the shape \[31, 64\].*\[32, 64\]"
    ):
        build_model(make_checkpoint(TIED, tensors), make_kernels(), max_model_len=16)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    config = replace(TIED, architecture="mamba")
    with pytest.raises(ModelLoadError, match="'mamba'; supported: llama"):
        build_model(make_checkpoint(config), make_kernels(), max_model_len=16)
