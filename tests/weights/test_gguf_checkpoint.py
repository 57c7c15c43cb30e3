"""A GGUF file as a Checkpoint: the same model as the Hugging Face folder, or a clear no."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from beds.tiny_files import (
    CHAT_TEMPLATE,
    EOS_ID,
    VOCAB_SIZE,
    interleave_rope_rows,
    tiny_config,
    tiny_merges,
    tiny_tokens,
    tiny_weights,
    write_tiny_gguf,
    write_tiny_hf,
)
from octavo.checkpoint import Checkpoint, RopeScaling
from octavo.errors import ModelLoadError
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_checkpoint import hugging_face_name, open_gguf
from octavo.weights.safetensors_checkpoint import open_hf_folder


def opened(tmp_path: Path, **how: Any) -> Checkpoint:
    return open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", **how), "tiny")


@pytest.mark.parametrize("tied", [True, False])
def test_both_formats_hold_the_same_model(tied: bool, tmp_path: Path) -> None:
    """C82: with and without a head; names, shapes, values and sizes agree exactly."""
    ours = opened(tmp_path, tied=tied)
    folder = open_hf_folder(write_tiny_hf(tmp_path / "hf", tied=tied), "tiny")
    want = tiny_weights(tied=tied)
    assert sorted(ours.weights.names()) == sorted(folder.weights.names()) == sorted(want)
    for name, tensor in want.items():
        assert ours.weights.shape(name) == folder.weights.shape(name) == tensor.shape
        assert np.array_equal(ours.weights.load(name), tensor)
        assert np.array_equal(folder.weights.load(name), tensor)
    for field in tiny_config():
        if hasattr(ours.config, field):
            assert getattr(ours.config, field) == getattr(folder.config, field)
    assert ours.config.tie_word_embeddings is tied
    assert ours.generation == folder.generation


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_rope_order_is_undone_in_every_format_before_dequantising(
    kind: str, tmp_path: Path
) -> None:
    """q and k equal the dequantised original rows: rows move as bytes and lose nothing."""
    weights = opened(tmp_path, weight_type=kind).weights
    qtype = gguf.GGMLQuantizationType[kind]
    for name, tensor in tiny_weights().items():
        stored = tensor if tensor.ndim == 1 else gguf.quants.quantize(tensor, qtype)
        want = tensor if tensor.ndim == 1 else gguf.quants.dequantize(stored, qtype)
        assert np.array_equal(weights.load(name), want), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_rows_are_those_of_load_before_dequantising(kind: str, tmp_path: Path) -> None:
    """Blocks taken as they are: the same order of rows (q and k too), nothing decoded."""
    weights = opened(tmp_path, weight_type=kind).weights
    qtype = gguf.GGMLQuantizationType[kind]
    for name, tensor in tiny_weights().items():
        stored = weights.load_stored(name, frozenset({kind}))
        if tensor.ndim == 1:
            assert stored is None, name  # norms are kept in float32
            continue
        assert stored is not None
        assert stored.kind == kind
        assert np.array_equal(stored.rows, gguf.quants.quantize(tensor, qtype)), name
        assert weights.load_stored(name, frozenset()) is None


def test_stored_q_and_k_are_interleaved_and_v_is_not(tmp_path: Path) -> None:
    """The bed really permutes: else the law above would hold for a reader that does nothing."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    raw, want = GGUFFile(path), tiny_weights()
    q = want["model.layers.0.self_attn.q_proj.weight"]
    k = want["model.layers.0.self_attn.k_proj.weight"]
    v = want["model.layers.0.self_attn.v_proj.weight"]
    assert np.array_equal(raw.load("blk.0.attn_q.weight"), interleave_rope_rows(q, 4))
    assert not np.array_equal(raw.load("blk.0.attn_q.weight"), q)
    assert np.array_equal(raw.load("blk.0.attn_k.weight"), interleave_rope_rows(k, 2))
    assert np.array_equal(raw.load("blk.0.attn_v.weight"), v)


def test_tokenizer_and_template_travel_whole(tmp_path: Path) -> None:
    spec = opened(tmp_path).tokenizer
    assert spec.kind == "gguf"
    assert spec.gguf["tokenizer.ggml.tokens"] == tiny_tokens()
    assert spec.gguf["tokenizer.ggml.merges"] == tiny_merges()
    assert spec.gguf["tokenizer.ggml.pre"] == "smollm"
    assert spec.gguf["tokenizer.ggml.add_bos_token"] is False
    assert all(key.startswith("tokenizer.") for key in spec.gguf)
    assert spec.chat_template == CHAT_TEMPLATE


def test_a_file_without_a_template_has_none(tmp_path: Path) -> None:
    assert (
        opened(tmp_path, metadata={"tokenizer.chat_template": None}).tokenizer.chat_template is None
    )


def test_every_id_that_ends_a_turn_is_an_eos(tmp_path: Path) -> None:
    """eos, eot and eom by key; a control token <|im_end|> also where no key names it."""
    keys = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 7}
    assert opened(tmp_path, metadata=keys).generation.eos_token_ids == (0, 7, EOS_ID)
    assert opened(tmp_path).generation.eos_token_ids == (EOS_ID,)


def test_sampling_defaults_come_from_the_file(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 40}
    assert opened(tmp_path, metadata=keys).generation.sampling == {"temperature": 0.6, "top_k": 40}


def test_rope_freqs_are_divisors_and_no_extra_tensor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C83: rope_freqs.weight is used as frequency factors, multiplied by a linear factor if any."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    checkpoint = opened(tmp_path, extra={"rope_freqs.weight": factors})
    assert checkpoint.config.rope_scaling == RopeScaling(
        kind="factors", factors=tuple(factors.tolist())
    )
    assert "rope_freqs.weight" not in checkpoint.weights.names()
    assert caplog.records == []
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    both = opened(tmp_path, extra={"rope_freqs.weight": factors}, metadata=linear)
    assert both.config.rope_scaling == RopeScaling(
        kind="factors", factors=tuple((2 * factors).tolist())
    )


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeScaling(kind="linear", factor=4.0),
        ),
        ({"llama.rope.scale_linear": 4.0}, RopeScaling(kind="linear", factor=4.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({}, None),
    ],
)
def test_linear_rope_scaling_is_read(
    keys: dict[str, Any], want: RopeScaling | None, tmp_path: Path
) -> None:
    assert opened(tmp_path, metadata=keys).config.rope_scaling == want


def test_unknown_extra_tensors_are_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C83."""
    with caplog.at_level(logging.WARNING, logger="octavo"):
        opened(tmp_path, extra={"blk.0.curiosity.weight": np.zeros(4, np.float32)})
    assert "blk.0.curiosity.weight" in caplog.text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architecture": "qwen3"}, r"'qwen3'.*Llama family"),
    "yarn": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "expert_count"),
    "a window": ({"metadata": {"llama.attention.sliding_window": 64}}, "sliding_window"),
    "half-rotated heads": ({"metadata": {"llama.rope.dimension_count": 8}}, "dimension_count"),
    "no layers": ({"metadata": {"llama.block_count": 0}}, "num_hidden_layers is 0"),
    "a billion layers": ({"metadata": {"llama.block_count": 10**9}}, "num_hidden_layers"),
    "more layers than stored": (
        {"metadata": {"llama.block_count": 16_000_000}},
        r"model\.layers\.2\.input_layernorm\.weight \[64\] is missing;.*and more",
    ),
    "heads that don't divide": ({"metadata": {"llama.attention.head_count": 3}}, "head"),
    "zero heads": ({"metadata": {"llama.attention.head_count": 0}}, "head"),
    "a missing size": ({"metadata": {"llama.embedding_length": None}}, "lacks llama.embedding"),
    "a size as text": ({"metadata": {"llama.block_count": "two"}}, "block_count is 'two'"),
    "heads by layer": ({"metadata": {"llama.attention.head_count_kv": [2, 1]}}, "array of 2"),
    "zero epsilon": ({"metadata": {"llama.attention.layer_norm_rms_epsilon": 0.0}}, "above zero"),
    "tokens as numbers": ({"metadata": {"tokenizer.ggml.tokens": [1, 2]}}, "array of str"),
    "tokens as text": ({"metadata": {"tokenizer.ggml.tokens": "abc"}}, "must be an array"),
    "merges as numbers": ({"metadata": {"tokenizer.ggml.merges": [1, 2]}}, "array of str"),
    "types as texts": ({"metadata": {"tokenizer.ggml.token_type": ["a"]}}, "array of int"),
    "too few types": ({"metadata": {"tokenizer.ggml.token_type": [1]}}, "1 entries for 300"),
    "no tokens": ({"metadata": {"tokenizer.ggml.tokens": None}}, "lacks tokenizer.ggml.tokens"),
    "too many tokens": (
        {"metadata": {"tokenizer.ggml.tokens": [str(i) for i in range(VOCAB_SIZE + 1)]}},
        "301 tokens, but the embedding has only 300 rows",
    ),
    "an eos past the end": ({"metadata": {"tokenizer.ggml.eos_token_id": 300}}, "no token's id"),
    "a missing embedding": ({"drop": ("token_embd.weight",)}, "token_embd.weight is missing"),
    "missing tensors": (
        {"drop": ("blk.0.ffn_up.weight", "blk.1.attn_norm.weight")},
        r"model\.layers\.0\.mlp\.up_proj\.weight \[96, 64\] is missing; "
        r"model\.layers\.1\.input_layernorm\.weight \[64\] is missing",
    ),
    "a wrong shape": (
        {"drop": ("output_norm.weight",), "extra": {"output_norm.weight": np.ones(65, "f4")}},
        r"model\.norm\.weight has shape \[65\], expected \[64\]",
    ),
    "a layer too many": (
        {"extra": {"blk.2.attn_norm.weight": np.ones(64, "f4")}},
        r"layers\.2\.input_layernorm.*2 layers",
    ),
    "a bias": ({"extra": {"blk.0.attn_q.bias": np.ones(64, "f4")}}, r"q_proj\.bias: biases"),
    "a query norm": ({"extra": {"blk.0.attn_q_norm.weight": np.ones(16, "f4")}}, "q_norm"),
    "factors of a wrong length": ({"extra": {"rope_freqs.weight": np.ones(7, "f4")}}, "rope_freqs"),
    "factors of zero": ({"extra": {"rope_freqs.weight": np.zeros(8, "f4")}}, "above zero"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_exactly_is_refused_by_name(case: str, tmp_path: Path) -> None:
    """C82, C83, C104: the text names the tensor or key, with shapes where they matter."""
    how, says = REFUSED[case]
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **how)
    with pytest.raises(ModelLoadError, match=says):
        open_gguf(path, "tiny")


def test_a_needed_tensor_in_an_unread_type_is_refused_at_opening(tmp_path: Path) -> None:
    """Before minutes of loading, not after."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_0")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16
    assert raw[at] == 2
    raw[at] = 20
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_up\.weight is stored as IQ4_NL.*Q4_K"):
        open_gguf(path, "tiny")


def test_asking_for_a_tensor_that_is_not_there_is_a_model_load_error(tmp_path: Path) -> None:
    weights = opened(tmp_path).weights
    for ask in (weights.load, weights.shape):
        with pytest.raises(ModelLoadError, match=r"no tensor lm_head\.weight"):
            ask("lm_head.weight")


def test_names_outside_the_map_stay_as_they_are() -> None:
    assert hugging_face_name("blk.11.attn_q.weight") == "model.layers.11.self_attn.q_proj.weight"
    assert hugging_face_name("blk.11.odd.weight") == "blk.11.odd.weight"
    assert hugging_face_name("output.weight") == "lm_head.weight"
