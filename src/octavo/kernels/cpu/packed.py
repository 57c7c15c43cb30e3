"""Packed weights in a file, which the next start maps instead of packing them again.

    magic | length of the index | digest of the index | index (JSON) | weights, one after another

One file for each model file and number format. Its mark says what it was made from: size, time and
a sample of the bytes of the model file, the instruction-set level, and the very code that packs. A
file is used if its mark, its index's digest, its length and the ends of each weight are right; what
lies between those ends is trusted. It is written beside its place by a thread of low priority, made
durable, and moved there: whole or not at all, whenever the process is killed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast
from zlib import crc32

from ... import __version__
from ...cache_folder import PACKED_SUFFIX, packed_files, packed_folder
from ...checkpoint import Checkpoint
from ..api import Array, Linear
from . import _native

logger = logging.getLogger("octavo")

MAGIC = b"octavo packed 1\n"
DIGEST_SIZE = 32
MAX_INDEX_SIZE = 1 << 28
ALIGNMENT = 4096
END = 4096
"""Bytes at each end of a weight that are checked at each start: all would cost too much."""
SAMPLES = 64
"""Pages of a large model file that its mark looks at."""
MIN_BYTES = 16 << 20
"""Smaller models are packed in no time."""
SHARE_OF_DISK = 0.1
"""Of the disk that all these files may take; the ones used longest ago go first."""
STALE_SECONDS = 3600.0
PATIENCE = 2.0
"""Seconds of waiting at exit before a line says what for."""
PREFIX = ".packing-"


class _Untrusted(Exception):
    """Why a file is not used."""


class PackedCache:
    """What is kept of one checkpoint: opened, asked for each weight, closed."""

    def __init__(self, checkpoint: Checkpoint, settings: tuple[object, ...], way: str) -> None:
        """settings: all that decides how weights are packed, besides the code.

        way: auto, map or copy, as the setting packed_cache.
        """
        name = re.sub(r"[^\w.-]+", "-", checkpoint.name)[:64]
        place = f"{checkpoint.path.resolve()} {settings}"
        short = blake2b(place.encode(), digest_size=6).hexdigest()
        self.path = packed_folder() / f"{name}-{short}{PACKED_SUFFIX}"
        self.report = "none kept yet"
        self.kinds: set[str] = set()
        self._mark: str | None = None
        self._found: dict[str, Linear] = {}
        self._used: dict[str, Linear] = {}
        self._num_fresh = 0
        try:
            self._mark = mark_of(checkpoint, settings)
            with self.path.open("rb") as file:
                self._read(file, way)
        except FileNotFoundError:
            pass
        except (OSError, _Untrusted, ValueError, RuntimeError, MemoryError) as error:
            logger.info("packed weights in %s are not used: %s", self.path, error)

    def _read(self, file: BinaryIO, way: str) -> None:
        index, start = read_index(file)
        if index["mark"] != self._mark:
            raise _Untrusted("they were made from another model file, or by another build")
        size = os.fstat(file.fileno()).st_size
        if size != start + index["nbytes"]:
            raise _Untrusted("the file is cut off, or longer than its index says")
        image = _native.open_image(file.fileno(), size, way)
        found: dict[str, Linear] = {}
        for key, layout, offset, nbytes, ends in index["weights"]:
            linear = _native.adopt(bytes.fromhex(layout), image, start + offset, nbytes)
            if ends != _ends(_native.packed_bytes(linear)):
                raise _Untrusted("a weight of it is damaged")
            found[key] = cast(Linear, linear)
        self._found, self.kinds = found, set(index["kinds"])
        how = "mapped" if image.is_mapped else "copied"
        huge = f", {image.huge_bytes >> 20:,} MiB of it on huge pages" if image.is_mapped else ""
        self.report = f"{size / 2**20:,.0f} MiB {how} from {self.path}{huge}"
        with suppress(OSError):
            os.utime(self.path)  # used now: the last to go

    def linear(self, key: str, pack: Callable[[], Linear]) -> Linear:
        """The weight that was kept under this key, or pack()."""
        linear = self._found.pop(key, None)
        if linear is None:
            linear = pack()
            self._num_fresh += 1
        self._used[key] = linear
        return linear

    def close(self, kinds: set[str]) -> None:
        """Keep all weights, if any is new; kinds: their formats, for the start-up report."""
        used, self._used, self._found = self._used, {}, {}
        nbytes = sum(linear.nbytes for linear in used.values())
        if not self._num_fresh or self._mark is None:  # None: it comes from no file
            return
        if nbytes < MIN_BYTES:
            self.report = "none kept: packing so few takes no time"
        elif problem := _no_room(self.path.parent, nbytes):
            self.report = f"not kept: {problem}"
        else:
            self.report = f"{nbytes / 2**20:,.0f} MiB packed, now being kept in {self.path}"
            index = {"mark": self._mark, "kinds": sorted(kinds)}
            _start(lambda: _keep(self.path, index, used))


def mark_of(checkpoint: Checkpoint, settings: tuple[object, ...]) -> str:
    """Of all that decides what the bytes of packed weights mean."""
    digest = blake2b(f"{__version__} {settings}".encode())
    for path in _model_files(checkpoint.path):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            for offset in _samples(status.st_size):
                digest.update(os.pread(file.fileno(), END, offset))
    digest.update(_code_digest(__name__) + _code_digest(type(checkpoint.weights).__module__))
    return digest.hexdigest()


def _model_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json"))


def _samples(size: int) -> Iterator[int]:
    """Offsets, spread evenly: the whole of a small file, the first and the last page of any."""
    last = max(0, size - END)
    count = min(SAMPLES, -(-size // END))
    return (last * i // max(1, count - 1) for i in range(count))


@cache
def _code_digest(module: str) -> bytes:
    """Of the source and the native modules in the folder that a module comes from."""
    file = sys.modules[module].__file__
    digest = blake2b()
    for path in sorted(Path(file).parent.iterdir()) if file else ():
        if path.suffix in (".py", ".so"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def _ends(data: Array) -> int:
    return crc32(data[-END:].data, crc32(data[:END].data))


def read_index(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The index of a file, and where its weights begin. Raises _Untrusted, OSError."""
    head = file.read(len(MAGIC) + 8 + DIGEST_SIZE)
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + 8 + DIGEST_SIZE:
        raise _Untrusted("it is no file of packed weights of this version")
    size = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
    text = file.read(size) if size < MAX_INDEX_SIZE else b""
    if blake2b(text, digest_size=DIGEST_SIZE).digest() != head[-DIGEST_SIZE:]:
        raise _Untrusted("its index is damaged or cut off")
    index: dict[str, Any] = json.loads(text)
    return index, len(head) + size


def _keep(path: Path, index: dict[str, Any], linears: Mapping[str, Linear]) -> None:
    """Write the file, or leave what was there; says in the log why it could not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent)
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=path.parent)
        _unfinished.add(name)
        try:
            try:
                _write(descriptor, index, linears)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        finally:
            _unfinished.discard(name)
        _remove_oldest(path)
        logger.info("packed weights are kept in %s", path)
    except OSError as error:
        logger.info("packed weights are not kept in %s: %s", path, error.strerror or error)


def _write(descriptor: int, index: dict[str, Any], linears: Mapping[str, Linear]) -> None:
    parts: list[Any] = []
    weights, offset = [], 0
    for key, linear in linears.items():
        data = _native.packed_bytes(linear)
        layout = _native.packed_layout(linear).hex()
        weights.append((key, layout, offset, len(data), _ends(data)))
        padding = -len(data) % ALIGNMENT
        parts += [data, bytes(padding)]
        offset += len(data) + padding
    text = json.dumps({**index, "weights": weights, "nbytes": offset}).encode()
    text += b" " * (-(len(MAGIC) + 8 + DIGEST_SIZE + len(text)) % ALIGNMENT)
    digest = blake2b(text, digest_size=DIGEST_SIZE).digest()
    head = MAGIC + len(text).to_bytes(8, "little") + digest + text
    _write_all(descriptor, [head, *parts])


def _write_all(descriptor: int, parts: list[Any]) -> None:
    """As few and large calls as can be: the page cache gets its huge pages from them."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    at, limit = 0, min(512, os.sysconf("SC_IOV_MAX"))
    while at < len(views):
        written = os.writev(descriptor, views[at : at + limit])
        while at < len(views) and written >= len(views[at]):
            written -= len(views[at])
            at += 1
        if written:
            views[at] = views[at][written:]


def _no_room(folder: Path, nbytes: int) -> str | None:
    """Why a file of this size can't be kept in the folder; None if it can."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} can't be written"
    disk = shutil.disk_usage(nearest)
    if nbytes > min(disk.total * SHARE_OF_DISK, disk.free / 2):
        return f"{nbytes >> 20:,} MiB are too much for the disk of {nearest}"
    return None


def _remove_oldest(new: Path) -> None:
    """All files together take their share of the disk at most; the new one stays."""
    room = shutil.disk_usage(new.parent).total * SHARE_OF_DISK
    for path, size in packed_files():
        room -= size
        if room < 0 and path != new:
            with suppress(OSError):
                path.unlink()


def _remove_stale(folder: Path) -> None:
    """Leftovers of processes that were killed while they wrote."""
    for left in folder.glob(PREFIX + "*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()


_writers: list[threading.Thread] = []
_unfinished: set[str] = set()


def _start(write: Callable[[], None]) -> None:
    def run() -> None:
        with suppress(OSError, AttributeError):  # the first answer matters more
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        write()

    thread = threading.Thread(target=run, name="packed weights", daemon=True)
    _writers.append(thread)
    thread.start()


def wait(patience: float | None = None) -> None:
    """Until what is being written is written; with patience, say so after so many seconds."""
    while _writers:
        writer = _writers.pop()
        writer.join(patience)
        if writer.is_alive():
            logger.warning("keeping packed weights for the next start (Ctrl-C leaves that)")
            while writer.is_alive():  # in turns: an interrupt may come without ending a call
                writer.join(0.1)


def _finish() -> None:
    """At exit."""
    try:
        wait(PATIENCE)
    except KeyboardInterrupt:
        for name in _unfinished:
            with suppress(OSError):
                os.unlink(name)


atexit.register(_finish)
