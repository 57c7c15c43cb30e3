"""A small memory-mapped reader of safetensors files (F32, F16, BF16).

    header length u64 | header, JSON: {name: {dtype, shape, data_offsets}} | data

bfloat16 becomes float32 by a shift, with no library that knows the type.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import StoredRows
from ..errors import ModelLoadError
from .dequantise import dequantise, flat
from .mapped_file import MappedFile

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER = 100_000_000
"""The format's own limit."""


class StoredTensor(NamedTuple):
    """Where one tensor lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


class SafetensorsFile:
    """One safetensors file: `tensors` by name; nothing but the header is read at first.

    Raises ModelLoadError if the file is damaged or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self.tensors: dict[str, StoredTensor] = {}
        length = int.from_bytes(self._file.map[:8], "little")
        data_start = 8 + length
        if self._file.num_bytes < 8 or data_start > min(self._file.num_bytes, MAX_HEADER):
            self._fail("the header does not fit in it")
        header = self._parse(self._file.map[8:data_start])
        for name, entry in header.items():
            if name != "__metadata__":
                self.tensors[name] = self._entry(name, entry, data_start)

    def load(self, name: str, *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """One tensor as float32, C order; into `out` if given."""
        info = self.tensors[name]
        self.check_readable(name)
        raw = self._file.bytes_at(info.offset, info.num_bytes)
        out = np.empty(info.shape, np.float32) if out is None else out
        dequantise(raw, info.dtype, flat(out, info.shape))
        del raw
        self._file.release(info.offset, info.num_bytes)
        return out

    def load_stored(self, name: str, kinds: frozenset[str]) -> StoredRows | None:
        """One tensor as its bytes [rows, row_bytes], if its type is one of `kinds`.

        A view into the file, until release().
        """
        info = self.tensors[name]
        self.check_readable(name)
        if info.dtype not in kinds:
            return None
        raw = self._file.lend(info.offset, info.num_bytes)
        return StoredRows(info.dtype, raw.reshape(info.shape[0], -1))

    def release(self) -> None:
        """Let go of the file's pages; what is read again comes back."""
        self._file.release_all()

    def check_readable(self, name: str) -> None:
        """Raise ModelLoadError, naming type and tensor, if the tensor's type is not read."""
        dtype = self.tensors[name].dtype
        if dtype not in ELEMENT_BYTES:
            raise ModelLoadError(
                f"{self.path}: tensor {name} is stored as {dtype}, which Octavo does not read; "
                f"take a checkpoint in one of {', '.join(ELEMENT_BYTES)}"
            )

    def _fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: not a whole safetensors file: {what}; fetch it again")

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            self._fail("its header is no JSON")
        if not isinstance(header, dict):
            self._fail("its header is no JSON object")
        return header

    def _entry(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            start, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            self._fail(f"the entry of tensor {name} is malformed")
        if not isinstance(dtype, str) or not all(
            type(number) is int and number >= 0 for number in (*shape, start, end)
        ):
            self._fail(f"the entry of tensor {name} is malformed")
        if not start <= end <= self._file.num_bytes - data_start:
            self._fail(f"tensor {name} {list(shape)} runs past its end")
        # A type we don't read may belong to a tensor that nobody needs: check_readable decides.
        if dtype in ELEMENT_BYTES and prod(shape) * ELEMENT_BYTES[dtype] != end - start:
            self._fail(f"tensor {name} {list(shape)} {dtype} is kept in {end - start} bytes")
        return StoredTensor(dtype, shape, data_start + start, end - start)
