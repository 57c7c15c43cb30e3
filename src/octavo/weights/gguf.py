"""A small memory-mapped reader of GGUF files, versions 2 and 3, for files that may be hostile.

    "GGUF" | version u32 | tensor count u64 | key count u64 | keys | tensor table | pad | data

Every count is held against the bytes that are left before anything is built from it, so a damaged
header costs neither time nor memory: it raises ModelLoadError. Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import StoredRows
from ..errors import ModelLoadError
from .dequantise import dequantise, flat
from .ggml_types import READABLE, type_name
from .mapped_file import MappedFile

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""struct codes of the scalar value types; 8 is a string, 9 an array."""
STRING, ARRAY = 8, 9

MAX_DIMS = 4
MAX_ENTRIES = 1 << 22
"""Array entries in all metadata together: several times the largest vocabulary there is."""
SMALLEST_KEY = 8 + 1 + 4 + 1
SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8


class TensorInfo(NamedTuple):
    """Where one tensor lies. `shape` is row-major (GGUF's dimensions reversed)."""

    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the start of the file
    num_bytes: int  # 0 when the type is one that is not read


class GGUFFile:
    """Metadata and tensor table of a GGUF file; tensors are read when asked for.

    metadata  values by whole key: int, float, bool, str, or a list of one of them
    tensors   TensorInfo by name, in file order
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            header = _Header(self._file)
            header.read()
        except struct.error:
            raise ModelLoadError(
                f"{path}: the GGUF header ends too early: the file is cut off; fetch it again"
            ) from None
        except UnicodeDecodeError:
            raise ModelLoadError(
                f"{path}: the GGUF header holds text that is not UTF-8: the file is damaged"
            ) from None
        self.metadata = header.metadata
        self.tensors = header.tensors

    def check_readable(self, name: str) -> None:
        """Raise ModelLoadError, naming type and tensor, if the tensor's type is not read."""
        type_id = self.tensors[name].type_id
        if type_id not in READABLE:
            known = ", ".join(kind.name for kind in READABLE.values())
            raise ModelLoadError(
                f"{self.path}: tensor {name} is stored as {type_name(type_id)}, which Octavo does "
                f"not read; take a file in one of {known}"
            )

    def load(
        self,
        name: str,
        *,
        num_interleaved_heads: int = 0,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Tensor `name` as float32, C order; into `out` if given.

        num_interleaved_heads  set for q and k: undoes the row order that llama GGUFs carry
        """
        self.check_readable(name)
        info = self.tensors[name]
        raw = self._file.bytes_at(info.offset, info.num_bytes)
        if num_interleaved_heads:
            raw = _undo_row_interleave(raw, info.shape[0], num_interleaved_heads)
        out = np.empty(info.shape, np.float32) if out is None else out
        dequantise(raw, READABLE[info.type_id].name, flat(out, info.shape))
        del raw
        self._file.release(info.offset, info.num_bytes)
        return out

    def load_stored(
        self, name: str, kinds: frozenset[str], *, num_interleaved_heads: int = 0
    ) -> StoredRows | None:
        """Tensor `name` as its blocks' bytes [rows, row_bytes], if its format is one of `kinds`.

        A view into the file, until release().
        """
        self.check_readable(name)
        info = self.tensors[name]
        kind = READABLE[info.type_id].name
        if kind not in kinds:
            return None
        raw = self._file.lend(info.offset, info.num_bytes)
        if num_interleaved_heads:
            raw = _undo_row_interleave(raw, info.shape[0], num_interleaved_heads)
        return StoredRows(kind, raw.reshape(info.shape[0], -1))

    def release(self) -> None:
        """Let go of the file's pages; what is read again comes back."""
        self._file.release_all()


def _undo_row_interleave(
    raw: NDArray[np.uint8], num_rows: int, num_heads: int
) -> NDArray[np.uint8]:
    """Rows of q or k from GGUF's rotary order to Hugging Face's, while still quantised.

    llama.cpp rotates neighbours (2i, 2i + 1) and so stores row j * half + i of each head at
    2i + j; rows are whole numbers of blocks, so they can move as bytes.
    """
    half = num_rows // num_heads // 2
    rows = raw.reshape(num_heads, half, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


class _Header:
    """A cursor over the header. Reading past the end raises struct.error."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.map = file.map
        self.size = file.num_bytes
        self.at = 0
        self.num_entries = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def read(self) -> None:
        """Fill in metadata and tensors."""
        if self.map[:4] != b"GGUF":
            self.fail("this is not a GGUF file (its first four bytes are not 'GGUF')")
        self.at = 4
        version = self.number("I")
        if version & 0xFFFF == 0:
            self.fail("this GGUF file is big-endian, which Octavo does not read")
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not read, only 2 and 3; convert the model again")
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        self.check_count(num_keys, SMALLEST_KEY, "metadata keys")
        self.check_count(num_tensors, SMALLEST_TENSOR, "tensors")
        for _ in range(num_keys):
            key = self.key("a metadata key", self.metadata)
            self.metadata[key] = self.value(key, self.number("I"))
        self.tensor_table(num_tensors)

    def fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {what}")

    def check_count(self, count: int, smallest: int, what: str) -> None:
        if count * smallest > self.size - self.at:
            self.fail(
                f"the header promises {count} {what}, more than the file has room for: it is "
                "damaged or cut off; fetch it again"
            )

    def number(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self.map, self.at)[0]
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.check_count(length, 1, "bytes of text")
        start, self.at = self.at, self.at + length
        return self.map[start : self.at].decode()

    def key(self, what: str, taken: dict[str, Any]) -> str:
        name = self.string()
        if not name:
            self.fail(f"{what} is empty: the file is damaged")
        if name in taken:
            self.fail(f"{what} occurs twice: {name!r}")
        return name

    def value(self, key: str, value_type: int) -> Any:
        if value_type == STRING:
            return self.string()
        if value_type == ARRAY:
            return self.array(key)
        if value_type not in SCALARS:
            self.fail(f"{key} has the unknown value type {value_type}")
        return self.number(SCALARS[value_type])

    def array(self, key: str) -> list[Any]:
        element_type, count = self.number("I"), self.number("Q")
        if element_type != STRING and element_type not in SCALARS:
            self.fail(f"{key} is an array of the unknown or nested type {element_type}")
        code = SCALARS.get(element_type, "Q")  # a string is at least its length
        self.check_count(count, struct.calcsize(f"<{code}"), f"entries in {key}")
        self.num_entries += count
        if self.num_entries > MAX_ENTRIES:
            self.fail(f"{key} brings the metadata to more than {MAX_ENTRIES} array entries")
        if element_type == STRING:
            return self.strings(key, count)
        values = list(struct.unpack_from(f"<{count}{code}", self.map, self.at))
        self.at += count * struct.calcsize(f"<{code}")
        return values

    def strings(self, key: str, count: int) -> list[str]:
        """The hot loop: a vocabulary has 50,000 to 260,000 texts, and often as many merges."""
        buffer, at, size = self.map, self.at, self.size
        length_at = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        append = texts.append
        for _ in range(count):
            start = at + 8
            at = start + length_at(buffer, at)[0]
            if at > size:
                self.fail(f"a text in {key} runs past the end: the file is damaged or cut off")
            append(buffer[start:at].decode())
        self.at = at
        return texts

    def tensor_table(self, num_tensors: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, but must be a power of two")
        table = [self.table_entry() for _ in range(num_tensors)]
        data_start = -(-self.at // alignment) * alignment
        for name, shape, type_id, offset in table:
            if offset % alignment:
                self.fail(f"tensor {name} is at offset {offset}, no multiple of {alignment}")
            num_bytes = self.stored_bytes(name, shape, type_id)
            if data_start + offset + num_bytes > self.size:
                self.fail(
                    f"tensor {name} {list(shape)} ends {data_start + offset + num_bytes} bytes into"
                    f" the file, which has only {self.size}: it is damaged or cut off"
                )
            self.tensors[name] = TensorInfo(shape, type_id, data_start + offset, num_bytes)
        if len(self.tensors) != num_tensors:
            self.fail("a tensor name occurs twice: the file is damaged")

    def table_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.key("a tensor name", self.tensors)
        num_dims = self.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            self.fail(f"tensor {name} has {num_dims} dimensions, but must have 1 to {MAX_DIMS}")
        dims = [self.number("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self.number("I"), self.number("Q")

    def stored_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        if 0 in shape:
            self.fail(f"tensor {name} has an empty dimension: {list(shape)}")
        if type_id not in READABLE:
            return 0
        kind = READABLE[type_id]
        if shape[-1] % kind.block_size:
            self.fail(
                f"tensor {name} has rows of {shape[-1]} elements, but {kind.name} keeps "
                f"{kind.block_size} in a block"
            )
        return prod(shape) // kind.block_size * kind.block_bytes
