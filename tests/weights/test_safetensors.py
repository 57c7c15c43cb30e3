"""A folder in Hugging Face form: one file or several, three number formats, clear refusals."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from beds.tiny_files import CHAT_TEMPLATE, EOS_ID, tiny_tokenizer_json, tiny_weights, write_tiny_hf
from octavo.checkpoint import Checkpoint
from octavo.errors import ModelLoadError
from octavo.weights.safetensors import SafetensorsFile
from octavo.weights.safetensors_checkpoint import open_hf_folder


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(values | changes), encoding="utf-8")


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_and_number_formats_change_no_value(
    dtype: str, num_shards: int, tmp_path: Path
) -> None:
    folder = write_tiny_hf(tmp_path / "m", dtype=dtype, num_shards=num_shards, tied=False)
    weights = open_hf_folder(folder, "m").weights
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for name, tensor in tiny_weights(tied=False).items():
        loaded = weights.load(name)
        assert loaded.dtype == np.float32
        assert np.array_equal(loaded, tensor.astype(stored).astype(np.float32)), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_stored_are_the_bytes_of_each_row(dtype: str, tmp_path: Path) -> None:
    """Also after release(): the pages that were let go of come back."""
    folder = write_tiny_hf(tmp_path / "m", dtype=dtype, num_shards=2, tied=False)
    weights = open_hf_folder(folder, "m").weights
    form = np.dtype(getattr(ml_dtypes, dtype, dtype))
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    for name, tensor in tiny_weights(tied=False).items():
        stored = weights.load_stored(name, frozenset({kind}))
        assert stored is not None
        weights.release()
        assert (stored.kind, len(stored.rows)) == (kind, len(tensor))
        assert stored.rows.tobytes() == tensor.astype(form).tobytes(), name
        assert weights.load_stored(name, frozenset({"Q8_0"})) is None


def test_bfloat16_keeps_infinities_and_nan(tmp_path: Path) -> None:
    values = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-40], ml_dtypes.bfloat16)
    save_file({"t": values}, tmp_path / "t.safetensors")
    loaded = SafetensorsFile(tmp_path / "t.safetensors").load("t")
    assert loaded.tobytes() == values.astype(np.float32).tobytes()


def test_tokenizer_template_and_defaults_come_from_their_files(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m")
    edit_json(folder / "special_tokens_map.json", cls_token="<cls>", eos_token="<other>")
    edit_json(
        folder / "generation_config.json", eos_token_id=[EOS_ID, 5], temperature=0.7, top_k=None
    )
    checkpoint = open_hf_folder(folder, "m")
    assert checkpoint.tokenizer.kind == "tokenizer.json"
    assert checkpoint.tokenizer.tokenizer_json == tiny_tokenizer_json()
    assert checkpoint.tokenizer.tokenizer_config["cls_token"] == "<cls>"
    assert checkpoint.tokenizer.tokenizer_config["eos_token"] == "<|im_end|>"
    assert checkpoint.tokenizer.chat_template == CHAT_TEMPLATE
    assert checkpoint.generation.eos_token_ids == (EOS_ID, 5)
    assert checkpoint.generation.sampling == {"temperature": 0.7}


def test_eos_falls_back_to_config_and_adds_the_tokenizers_own(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m", config={"eos_token_id": 9})
    (folder / "generation_config.json").unlink()
    assert open_hf_folder(folder, "m").generation.eos_token_ids == (9,)
    added = {"2": {"content": "<|im_end|>"}, "1": {"content": "<|im_start|>"}, "x": 3}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    assert open_hf_folder(folder, "m").generation.eos_token_ids == (9, EOS_ID)


def test_a_template_file_wins_and_named_templates_mean_the_default(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert open_hf_folder(folder, "m").tokenizer.chat_template == "D"
    (folder / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert open_hf_folder(folder, "m").tokenizer.chat_template == "J"


def test_a_head_beside_tied_embeddings_is_no_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C82: the flag decides; a stored copy is not even worth a warning."""
    head = tiny_weights()["model.embed_tokens.weight"]
    folder = write_tiny_hf(tmp_path / "m", tied=True, extra={"lm_head.weight": head})
    assert open_hf_folder(folder, "m").config.tie_word_embeddings is True
    assert caplog.records == []


def test_a_missing_head_without_the_tie_flag_is_named(tmp_path: Path) -> None:
    """C82."""
    folder = write_tiny_hf(tmp_path / "m", tied=False, drop=("lm_head.weight",))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight \[300, 64\] is missing"):
        open_hf_folder(folder, "m")


def test_old_rotary_buffers_pass_in_silence_and_unknown_tensors_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C83."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    open_hf_folder(write_tiny_hf(tmp_path / "a", extra=extra), "a")
    assert caplog.records == []
    open_hf_folder(write_tiny_hf(tmp_path / "b", extra={"odd": np.ones(8, np.float32)}), "b")
    assert "does not use: odd" in caplog.text


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """C83: before anything is read."""
    folder = write_tiny_hf(tmp_path / "m", num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of 3 .*missing: model-00002-of-00003\.safetens"):
        open_hf_folder(folder, "m")


def test_a_tensor_missing_from_its_shard_is_named_with_both(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m", num_shards=2)
    save_file({"x": np.ones(1, np.float32)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelLoadError, match=r"says that model\..* is in model-00002-of-00002"):
        open_hf_folder(folder, "m")


def test_wrong_shapes_are_listed_before_any_large_allocation(tmp_path: Path) -> None:
    """C83: a config that asks for a giant finds out from the header, for kilobytes of memory."""
    folder = write_tiny_hf(tmp_path / "m", config={"intermediate_size": 1 << 20})
    tracemalloc.start()
    try:
        with pytest.raises(
            ModelLoadError,
            match=r"gate_proj\.weight has shape \[96, 64\], expected \[1048576, 64\]; .*up_proj",
        ):
            open_hf_folder(folder, "m")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", 3, ".."])
def test_an_index_cannot_point_out_of_its_folder(name: Any, tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m", num_shards=2)
    index = folder / "model.safetensors.index.json"
    edit_json(index, weight_map={"model.norm.weight": name})
    with pytest.raises(ModelLoadError, match=r"no file name|missing"):
        open_hf_folder(folder, "m")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("config.json", r"there is no config\.json.*\.gguf"),
        ("tokenizer.json", r"there is no tokenizer\.json"),
        ("model.safetensors", "only safetensors and GGUF"),
    ],
)
def test_a_missing_file_is_named_with_what_to_do(file: str, says: str, tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m")
    (folder / file).unlink()
    with pytest.raises(ModelLoadError, match=says):
        open_hf_folder(folder, "m")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe\xfa", b"[" * 100_000, b""])
def test_malformed_json_is_a_model_load_error(file: str, content: bytes, tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m")
    (folder / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=file):
        open_hf_folder(folder, "m")


def with_header(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0\0",
        struct.pack("<Q", 2**63) + b"{}",
        with_header(b"[]"),
        with_header(b"{" + b"[" * 200_000),
        with_header({"t": 3}),
        with_header({"t": {"dtype": "F32"}}),
        with_header(entry(shape=3), b"\0" * 8),
        with_header(entry(shape=(2, -1)), b"\0" * 8),
        with_header(entry(shape=(2**32, 2**32)), b"\0" * 8),
        with_header(entry(shape=(2.0,)), b"\0" * 8),
        with_header(entry(offsets=(0, 2**60)), b"\0" * 8),
        with_header(entry(offsets=(8, 0)), b"\0" * 8),
        with_header(entry(offsets=(0, 8, 8)), b"\0" * 8),
        with_header(entry(), b"\0" * 7),
        with_header(entry(dtype=["F32"]), b"\0" * 8),
    ],
)
def test_malformed_safetensors_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"t\.safetensors"):
        SafetensorsFile(path)


def test_a_type_that_is_not_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(with_header(entry(dtype="F8_E4M3", shape=(8,)), b"\0" * 8))
    with pytest.raises(ModelLoadError, match="tensor t is stored as F8_E4M3"):
        SafetensorsFile(path).load("t")
    folder = write_tiny_hf(tmp_path / "m")
    blob = (folder / "model.safetensors").read_bytes().replace(b'"F32"', b'"F64"', 1)
    (folder / "model.safetensors").write_bytes(blob)
    with pytest.raises(ModelLoadError, match="F64, which Octavo does not read"):
        open_hf_folder(folder, "m")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("hf") / "small", dtype="bfloat16")


@given(
    edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 1 << 20)),
)
def test_mutated_headers_load_or_raise_model_load_error(
    edits: list[tuple[int, int]], cut: int | None, small_folder: Path
) -> None:
    whole = small_folder / "whole.bin"
    file = small_folder / "model.safetensors"
    if not whole.exists():
        whole.write_bytes(file.read_bytes())
    raw = bytearray(whole.read_bytes())
    header_end = 8 + int.from_bytes(raw[:8], "little")
    for place, value in edits:
        raw[place % header_end] = value
    file.unlink()  # the file that was mapped before keeps its bytes
    file.write_bytes(raw if cut is None else raw[: cut % len(raw)])
    outcome = opened_or_refused(small_folder)
    if isinstance(outcome, ModelLoadError):
        assert str(small_folder) in str(outcome)
    else:
        assert outcome.weights.load("model.norm.weight").shape == (64,)


def opened_or_refused(folder: Path) -> Checkpoint | ModelLoadError:
    try:
        return open_hf_folder(folder, "mutated")
    except ModelLoadError as error:
        return error
