"""Where blocks of K/V go below the pool: RAM first, then a file; both of a fixed size."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from ..config import CacheConfig
from ..errors import ConfigError
from ..kernels.api import Array, KVCache
from ..messages import Moved, Transfer

logger = logging.getLogger("octavo")


class Tiers:
    """Slots 0 .. num_ram_slots - 1 are in RAM, the following num_file_slots in a file.

    Memory and file grow when they are first used. The file has no name: it is gone with the
    process, however that ends.
    """

    def __init__(self, config: CacheConfig, kv_cache: KVCache) -> None:
        """Raises ConfigError if a tier does not hold one block, or the file can't be made."""
        self.kv_cache = kv_cache
        nbytes = kv_cache.block_nbytes
        for name in ("ram_tier_memory", "file_tier_memory"):
            value = getattr(config, name)
            if 0 < value < nbytes:
                raise ConfigError(name, value, f"0, or at least one block of {nbytes:,} bytes")
        self.num_slots = (config.ram_tier_memory // nbytes, config.file_tier_memory // nbytes)
        self._ram = np.empty((self.num_slots[0], nbytes), np.uint8)  # resident when written
        self._block = np.empty(nbytes, np.uint8)
        self._bad_slots: set[int] = set()
        """What was to be stored there could not be written."""
        self._file: int | None = None
        if self.num_slots[1]:
            try:
                with tempfile.TemporaryFile(dir=config.file_tier_dir, prefix="octavo-") as file:
                    self._file = os.dup(file.fileno())
            except OSError as error:
                where = config.file_tier_dir or tempfile.gettempdir()
                raise ConfigError(
                    "file_tier_dir", where, f"a folder that can be written: {error.strerror}"
                ) from None

    def close(self) -> None:
        """Give back RAM and file."""
        self._ram = np.empty((0, 0), np.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def move(self, transfers: Sequence[Transfer]) -> tuple[set[int], tuple[Moved, ...]]:
        """Do these in order. Returns blocks that could not be loaded, and what it took."""
        lost: set[int] = set()
        took: dict[tuple[str, int], tuple[int, float]] = {}
        at = 0
        try:
            for at, (kind, source, target) in enumerate(transfers):  # noqa: B007
                start = perf_counter()
                if not self._move(kind, source, target):
                    lost.add(target)
                if kind == "copy":
                    continue
                tier = int((target if kind == "store" else source) >= self.num_slots[0])
                num_blocks, seconds = took.get((kind, tier), (0, 0.0))
                took[kind, tier] = (num_blocks + 1, seconds + perf_counter() - start)
        except BaseException:  # Ctrl-C: what was not stored must not be read
            self._bad_slots |= {target for kind, _, target in transfers[at:] if kind == "store"}
            raise
        moved = (Moved(*key, num, round(seconds * 1e6)) for key, (num, seconds) in took.items())
        return lost, tuple(moved)

    def _move(self, kind: str, source: int, target: int) -> bool:
        """Whether the target can be read afterwards."""
        if kind == "store":
            self._store(source, target)
            return True
        if kind == "load":
            return self._load(source, target)
        self.kv_cache.save_block(source, self._block)
        self.kv_cache.restore_block(target, self._block)
        return True

    def read(self, place: int, in_tier: bool) -> Array | None:
        """A block of the pool, or of a slot; valid until the next call. None: unreadable."""
        if not in_tier:
            self.kv_cache.save_block(place, self._block)
        elif place in self._bad_slots:
            return None
        elif place < self.num_slots[0]:
            row: Array = self._ram[place]
            return row
        elif not self._read(place, self._block):
            return None
        return self._block

    def fill(self, slot: int, block: Array) -> None:
        """Put a block into a slot. Raises OSError."""
        if slot < self.num_slots[0]:
            self._ram[slot] = block
        else:
            self._write(slot, block)

    def _store(self, block_id: int, slot: int) -> None:
        self._bad_slots.discard(slot)
        if slot < self.num_slots[0]:
            self.kv_cache.save_block(block_id, self._ram[slot])
            return
        self.kv_cache.save_block(block_id, self._block)
        try:
            self.fill(slot, self._block)
        except OSError as error:
            logger.error("storing K/V in the file tier failed: %s", error)
            self._bad_slots.add(slot)

    def _load(self, slot: int, block_id: int) -> bool:
        """Whether it could be read."""
        block = self.read(slot, True)
        if block is None:
            return False
        self.kv_cache.restore_block(block_id, block)
        return True

    def _write(self, slot: int, block: Array) -> None:
        assert self._file is not None
        start = (slot - self.num_slots[0]) * len(block)
        written = os.pwrite(self._file, block.data, start)
        if written != len(block):
            raise OSError(f"{written} of {len(block)} bytes were written")

    def _read(self, slot: int, block: Array) -> bool:
        assert self._file is not None
        start = (slot - self.num_slots[0]) * len(block)
        try:
            return os.preadv(self._file, [block.data], start) == len(block)
        except OSError as error:
            logger.error("reading K/V from the file tier failed: %s", error)
            return False

    def describe(self) -> str:
        """For the start-up report."""
        ram, file = (n * self.kv_cache.block_nbytes / 2**20 for n in self.num_slots)
        return f"{ram:,.0f} MiB of RAM and {file:,.0f} MiB in a file below the pool"
