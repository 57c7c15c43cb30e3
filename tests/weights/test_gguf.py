"""The GGUF reader: equal to the gguf package on whole files, calm on damaged ones (C104)."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from beds.tiny_files import write_tiny_gguf
from octavo.checkpoint import Checkpoint
from octavo.errors import ModelLoadError
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_checkpoint import open_gguf

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, value_type: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", value_type) + value


def array(element_type: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", element_type, count) + values


def tensor(name: str, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + packed + struct.pack("<IQ", type_id, offset)


def gguf_bytes(
    *,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    num_keys: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
    data: bytes = b"",
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys + tensors)
    return head + b"\0" * (-len(head) % 32) + data


DATA = bytes(range(128))
GOOD_TENSOR = tensor("t", [4, 2])
MALFORMED = {
    "empty file": b"",
    "four bytes": b"GGUF",
    "another format": b"PK\x03\x04" + b"\0" * 100,
    "version 1": gguf_bytes(version=1),
    "version 4": gguf_bytes(version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 64,
    "a million dimensions": gguf_bytes(
        tensors=(text("t") + struct.pack("<I", 10**6) + b"\1" * 64,), data=DATA
    ),
    "no dimensions": gguf_bytes(tensors=(tensor("t", []),), data=DATA),
    "an empty dimension": gguf_bytes(tensors=(tensor("t", [4, 0]),), data=DATA),
    "dimensions that overflow 64 bits": gguf_bytes(
        tensors=(tensor("t", [2**33, 2**33]),), data=DATA
    ),
    "dimensions whose product is 0 modulo 2^64": gguf_bytes(
        tensors=(tensor("t", [2**32, 2**32, 1, 1]),), data=DATA
    ),
    "a string longer than the file": gguf_bytes(
        keys=(key("k", STRING, struct.pack("<Q", 2**40) + b"abc"),), data=DATA
    ),
    "a string of 2^64 - 1": gguf_bytes(
        keys=(key("k", STRING, struct.pack("<Q", 2**64 - 1) + b"abc"),), data=DATA
    ),
    "a string in an array longer than the file": gguf_bytes(
        keys=(key("k", ARRAY, array(STRING, 1, struct.pack("<Q", 2**63))),), data=DATA
    ),
    "text that is not UTF-8": gguf_bytes(keys=(key("k", STRING, text(b"\xff\xfe")),)),
    "an empty key": gguf_bytes(keys=(key("", U32, b"\1\0\0\0"),), data=DATA),
    "an empty tensor name": gguf_bytes(tensors=(tensor("", [4, 2]),), data=DATA),
    "a key twice": gguf_bytes(keys=(key("k", U32, b"\1\0\0\0"),) * 2, data=DATA),
    "a tensor twice": gguf_bytes(tensors=(GOOD_TENSOR, GOOD_TENSOR), data=DATA),
    "an unknown value type": gguf_bytes(keys=(key("k", 99, b"\0" * 8),), data=DATA),
    "an unknown element type": gguf_bytes(keys=(key("k", ARRAY, array(99, 1)),), data=DATA),
    "arrays in arrays": gguf_bytes(
        keys=(key("k", ARRAY, array(ARRAY, 1) + array(U32, 0)),), data=DATA
    ),
    "an array of 2^40": gguf_bytes(keys=(key("k", ARRAY, array(U32, 2**40)),), data=DATA),
    "an array of 2^61 that overflows": gguf_bytes(
        keys=(key("k", ARRAY, array(U64, 2**61)),), data=DATA
    ),
    "2^40 strings": gguf_bytes(keys=(key("k", ARRAY, array(STRING, 2**40)),), data=DATA),
    "2^40 tensors": gguf_bytes(num_tensors=2**40, data=DATA),
    "2^40 keys": gguf_bytes(num_keys=2**40, data=DATA),
    "fewer keys than promised": gguf_bytes(num_keys=3, data=b"\0" * 16),
    "an offset past the end": gguf_bytes(tensors=(tensor("t", [4, 2], offset=2**20),), data=DATA),
    "an offset that overflows": gguf_bytes(
        tensors=(tensor("t", [4, 2], offset=2**64 - 32),), data=DATA
    ),
    "an offset out of line": gguf_bytes(tensors=(tensor("t", [4, 2], offset=4),), data=DATA),
    "data cut off": gguf_bytes(tensors=(GOOD_TENSOR,), data=DATA[:31]),
    "rows that are no whole blocks": gguf_bytes(tensors=(tensor("t", [33], 8),), data=DATA),
    "alignment 0": gguf_bytes(
        keys=(key("general.alignment", U32, struct.pack("<I", 0)),), data=DATA
    ),
    "alignment 3": gguf_bytes(
        keys=(key("general.alignment", U32, struct.pack("<I", 3)),), data=DATA
    ),
    "alignment as text": gguf_bytes(keys=(key("general.alignment", STRING, text("32")),)),
    "alignment past the end": gguf_bytes(
        keys=(key("general.alignment", U32, struct.pack("<I", 2**31)),),
        tensors=(GOOD_TENSOR,),
        data=DATA,
    ),
}


@pytest.mark.parametrize("damage", MALFORMED)
def test_malformed_files_are_refused_without_memory(damage: str, tmp_path: Path) -> None:
    """C104: ModelLoadError with the path in it, whatever the header promises."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(MALFORMED[damage])
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=r"bad\.gguf: "):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_large_file_of_junk_builds_no_large_array(tmp_path: Path) -> None:
    """C104: an array may fill the file, but metadata has a limit of entries."""
    path = tmp_path / "bad.gguf"
    with path.open("wb") as file:
        count = 60 << 20
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key("k", ARRAY, array(BOOL, count)))
        file.truncate(file.tell() + count)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match="entries"):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_well_formed_neighbour_of_the_malformed_files_is_read(tmp_path: Path) -> None:
    """Proves that the builder of the damaged files is not itself what gets refused."""
    path = tmp_path / "good.gguf"
    path.write_bytes(
        gguf_bytes(
            keys=(
                key("general.alignment", U32, struct.pack("<I", 16)),
                key("list", ARRAY, array(STRING, 2, text("a") + text("é"))),
            ),
            tensors=(GOOD_TENSOR, tensor("u", [2], offset=32)),
            data=DATA,
        )
    )
    file = GGUFFile(path)
    assert file.metadata == {"general.alignment": 16, "list": ["a", "é"]}
    assert file.load("t").tobytes() == DATA[:32]
    assert file.load("t").shape == (2, 4)
    assert file.load("u").tobytes() == DATA[32:40]


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_equal_those_of_the_gguf_package(version: int, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1", tied=False)
    raw = bytearray(path.read_bytes())
    raw[4] = version
    path.write_bytes(raw)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: f for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == {name: field.contents() for name, field in fields.items()}
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        want = gguf.quants.dequantize(t.data, t.tensor_type)
        assert ours.load(t.name).shape == tuple(reversed(t.shape.tolist()))
        assert np.array_equal(ours.load(t.name), want.reshape(ours.load(t.name).shape))


def test_every_scalar_type_is_read_with_its_sign_and_width(tmp_path: Path) -> None:
    path = tmp_path / "scalars.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "naïve 😊",
    }
    for name, value in values.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_array("ints", [-1, 2])
    writer.add_array("floats", [0.25, -2.0])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    assert {name: metadata[name] for name in values} == values
    assert metadata["ints"] == [-1, 2]
    assert metadata["floats"] == [0.25, -2.0]
    assert metadata["bools"] == [True, False]
    assert metadata["bool"] is True


def test_a_type_that_is_not_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    path.write_bytes(gguf_bytes(tensors=(tensor("blk.0.attn_q.weight", [256, 2], 23),), data=DATA))
    file = GGUFFile(path)  # the header is fine: a tensor nobody asks for may be anything
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight is stored as IQ4_XS"):
        file.load("blk.0.attn_q.weight")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", weight_type="Q8_0")


@given(
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.one_of(st.none(), st.integers(0, 1 << 20)),
)
@example(edits=[(16, 255)], cut=None)
@example(edits=[(0, 71)], cut=100)
def test_mutated_headers_load_or_raise_model_load_error(
    edits: list[tuple[int, int]], cut: int | None, small_file: Path
) -> None:
    """C104: whatever bytes of the header change, only ModelLoadError or a checkpoint comes out."""
    raw = bytearray(small_file.read_bytes())
    header = raw.index(b"tokenizer.ggml.tokens")  # the dense part: counts, sizes, keys
    table = raw.index(b"token_embd.weight")
    for place, value in edits:
        where = place % header if place % 2 else table + place % 1500
        raw[where] = value
    mutated = small_file.with_name("mutated.gguf")
    mutated.write_bytes(raw if cut is None else raw[: cut % len(raw)])
    outcome = opened_or_refused(mutated)
    if isinstance(outcome, ModelLoadError):
        assert str(mutated) in str(outcome)
    else:
        assert outcome.weights.load("model.norm.weight").shape == (64,)


def opened_or_refused(path: Path) -> Checkpoint | ModelLoadError:
    try:
        return open_gguf(path, "mutated")
    except ModelLoadError as error:
        return error
