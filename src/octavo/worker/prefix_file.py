"""The file in which the prefix cache outlives a process: whole, or not trusted at all.

    magic | length of the index | digest of the index | blocks, one after another | index (JSON)

The index holds the fingerprint, the runs with their tokens, and a checksum of each block. A new
file is written beside the old one, made durable, and takes its place in one move: of two
processes with one path, the last to write decides what is in it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
from ..durable import Postponed, refusal, replacing
from ..errors import ConfigError
from ..kernels.api import Kernels
from ..messages import KeptRun
from ..models.registry import Model
from .tiers import Tiers

logger = logging.getLogger("octavo")

MAGIC = b"octavo prefixes 2\n"
DIGEST_SIZE = 32
HEAD_SIZE = len(MAGIC) + 8 + DIGEST_SIZE


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
    folder = Path(sys.modules[type(thing).__module__].__file__ or "").parent
    return sorted(p for p in folder.iterdir() if p.suffix in (".py", ".so"))


def save_prefixes(
    path: str, runs: Sequence[KeptRun], mark: str, tiers: Tiers, *, go_on: Callable[[], bool]
) -> None:
    """Replace the file at `path`. Raises OSError, or Postponed once `go_on` says no; then the old
    one is still there.

    Runs that can't be read any more are left out, with those that follow them.
    """
    rows: list[tuple[str, int, tuple[int, ...], int]] = []
    checksums: list[int] = []
    index_of = {-1: -1}
    with replacing(path) as file:
        file.seek(HEAD_SIZE)
        for number, run in enumerate(runs):
            if not go_on():
                raise Postponed
            found = (tiers.read(place, run.in_tier) for place in run.places)
            blocks = [block.tobytes() for block in found if block is not None]
            if len(blocks) == len(run.places) and run.parent in index_of:
                file.writelines(blocks)
                checksums += map(crc32, blocks)
                index_of[number] = len(rows)
                rows.append((run.scope, index_of[run.parent], run.token_ids, len(blocks)))
        index = {"fingerprint": mark, "runs": rows, "checksums": checksums}
        text = json.dumps(index, separators=(",", ":")).encode()
        file.write(text)
        file.seek(0)
        file.write(MAGIC + len(text).to_bytes(8, "little") + _digest(text))
    logger.info("prefix cache: kept %d blocks in %s", len(checksums), path)


def load_prefixes(path: str, mark: str, tiers: Tiers) -> list[KeptRun]:
    """Read a file into slots 0, 1, ... of the tiers, as much as they hold; the runs that are there.

    Nothing is taken from a file that is not whole, or that another model, backend or version
    wrote: a line in the log says why. Raises ConfigError where no file could be written later.
    """
    if wanted := refusal(path):
        raise ConfigError("prefix_cache_file", path, wanted)
    try:
        with open(path, "rb") as file:
            runs = _read(file, mark, tiers)
    except FileNotFoundError:
        return []
    except Exception as error:  # whatever it holds, the engine starts without it
        why = error if isinstance(error, OSError | _Untrusted) else f"it is damaged: {error!r}"
        logger.warning("prefix cache file %s is not used: %s", path, why)
        for slot in range(sum(tiers.num_slots)):
            tiers.drop(slot)
        return []
    logger.info("prefix cache: %d blocks from %s", sum(len(r.places) for r in runs), path)
    return runs


def _read(file: BinaryIO, mark: str, tiers: Tiers) -> list[KeptRun]:
    head = file.read(HEAD_SIZE)
    if not head.startswith(MAGIC) or len(head) < HEAD_SIZE:
        raise _Untrusted("it is no prefix cache file of this version")
    size = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
    num_bytes = os.fstat(file.fileno()).st_size - HEAD_SIZE - size
    file.seek(HEAD_SIZE + max(0, num_bytes))
    text = file.read()
    if num_bytes < 0 or _digest(text) != head[-DIGEST_SIZE:]:
        raise _Untrusted("it is damaged or cut off")
    index: dict[str, Any] = json.loads(text)
    if index["fingerprint"] != mark:
        raise _Untrusted("it was written for another model, backend or version")
    nbytes = tiers.block_nbytes
    checksums: list[int] = index["checksums"]
    if num_bytes != nbytes * len(checksums):
        raise _Untrusted("it has not the size that its index says")
    for number in range(len(checksums))[::-1]:  # the most recently used ones last: they stay in RAM
        file.seek(HEAD_SIZE + number * nbytes)
        block = np.frombuffer(file.read(nbytes), np.uint8)
        if crc32(block.data) != checksums[number]:
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
