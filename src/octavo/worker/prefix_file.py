"""The file in which the prefix cache outlives a process: whole, or not trusted at all.

    magic | length of the index | digest of the index | index (JSON) | blocks, one after another

The index holds the fingerprint, the runs with their tokens, and a checksum of each block. A new
file is written beside the old one, made durable, and takes its place in one move.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from .. import __version__
from ..checkpoint import Checkpoint
from ..config import EngineConfig
from ..kernels.api import Kernels
from ..messages import KeptRun
from ..models.registry import Model
from .tiers import Tiers

logger = logging.getLogger("octavo")

MAGIC = b"octavo prefixes 1\n"
DIGEST_SIZE = 32
MAX_INDEX_SIZE = 1 << 32


class _Untrusted(Exception):
    """Why a file is not used."""


def fingerprint(
    config: EngineConfig, checkpoint: Checkpoint, kernels: Kernels, model: Model
) -> str:
    """Of all that decides what the bytes of stored K/V mean: model file, its shape and rope,
    number format, layout, instruction-set level, and the very code of kernels and models."""
    layout = (config.cache.block_size, config.cache.kv_cache_dtype)
    backend = replace(config.backend, threads=None, packed_cache="auto", huge_pages=True)
    digest = blake2b(f"{__version__} {layout} {backend} {checkpoint.config}".encode())
    report = kernels.describe()
    described = [report.get(key) for key in ("backend", "isa", "dtype", "weight format")]
    digest.update(f"{described} {np.__version__}".encode())
    digest.update(model.cos_sin_cache.tobytes())
    for path in (*_files(checkpoint.path), *_code(kernels), *_code(model)):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json"))


def _code(thing: object) -> list[Path]:
    """Source and native modules of the package that `thing` comes from."""
    file = sys.modules[type(thing).__module__].__file__
    assert file is not None
    folder = Path(file).parent
    return sorted(p for p in folder.iterdir() if p.suffix in (".py", ".so"))


def save_prefixes(path: str, runs: Sequence[KeptRun], mark: str, tiers: Tiers) -> None:
    """Replace the file at `path`. Raises OSError; then the old one is still there."""
    checksums: list[int] = []
    for run in runs:
        for place in run.places:
            block = tiers.read(place, run.in_tier)
            if block is None:
                raise OSError("a block of the tiers can't be read")
            checksums.append(crc32(block.data))
    index = {
        "fingerprint": mark,
        "runs": [(run.scope, run.parent, run.token_ids, len(run.places)) for run in runs],
        "checksums": checksums,
    }
    text = json.dumps(index, separators=(",", ":")).encode()
    new = Path(path + ".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(MAGIC + len(text).to_bytes(8, "little") + _digest(text) + text)
        for run in runs:
            for place in run.places:
                block = tiers.read(place, run.in_tier)
                assert block is not None
                file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(Path(path).resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    logger.info("prefix cache: kept %d blocks in %s", len(checksums), path)


def load_prefixes(path: str, mark: str, tiers: Tiers) -> list[KeptRun]:
    """Read a file into slots 0, 1, ... of the tiers, as much as they hold; the runs that are there.

    Nothing is taken from a file that is not whole, or that another model, backend or version
    wrote: a line in the log says why.
    """
    try:
        with open(path, "rb") as file:
            runs = _read(file, mark, tiers)
    except FileNotFoundError:
        return []
    except (OSError, _Untrusted) as error:
        logger.warning("prefix cache file %s is not used: %s", path, error)
        return []
    logger.info("prefix cache: %d blocks from %s", sum(len(r.places) for r in runs), path)
    return runs


def _read(file: BinaryIO, mark: str, tiers: Tiers) -> list[KeptRun]:
    head = file.read(len(MAGIC) + 8 + DIGEST_SIZE)
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + 8 + DIGEST_SIZE:
        raise _Untrusted("it is no prefix cache file of this version")
    size = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
    text = file.read(size) if size < MAX_INDEX_SIZE else b""
    if _digest(text) != head[-DIGEST_SIZE:]:
        raise _Untrusted("its index is damaged or cut off")
    index: dict[str, Any] = json.loads(text)
    if index["fingerprint"] != mark:
        raise _Untrusted("it was written for another model, backend or version")
    nbytes = tiers.kv_cache.block_nbytes
    checksums: list[int] = index["checksums"]
    if os.fstat(file.fileno()).st_size != file.tell() + nbytes * len(checksums):
        raise _Untrusted("it is cut off, or longer than its index says")
    start = file.tell()
    for number in range(len(checksums))[::-1]:  # the most recently used ones last: they stay in RAM
        file.seek(start + number * nbytes)
        block = np.frombuffer(file.read(nbytes), np.uint8)
        if len(block) != nbytes or crc32(block.data) != checksums[number]:
            raise _Untrusted("a block of it is damaged")
        if number < sum(tiers.num_slots):
            tiers.fill(number, partial(np.copyto, src=block))
    return list(_runs(index["runs"], tiers))


def _runs(rows: list[Any], tiers: Tiers) -> Iterator[KeptRun]:
    """As many of the runs, in their order, as the tiers have slots for."""
    slot, block_size = 0, tiers.kv_cache.block_size
    for scope, parent, token_ids, num_blocks in rows:
        if len(token_ids) != num_blocks * block_size:
            raise _Untrusted("its tokens do not fill its blocks")
        if slot + num_blocks > sum(tiers.num_slots):
            return
        places = tuple(range(slot, slot + num_blocks))
        yield KeptRun(scope, parent, tuple(token_ids), places, True)
        slot += num_blocks


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=DIGEST_SIZE).digest()
