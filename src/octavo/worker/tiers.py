"""Where blocks of K/V go below the pool: RAM first, then a file; both of a fixed size.

The scheduler counts slots, room for a block each. Which of them is in RAM and which in the file
is decided here: what was stored last is in RAM, and what was stored there longest ago moves on
to the file (a slot is given up when it is loaded, so that is least recently used first).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np

from ..config import CacheConfig
from ..errors import ConfigError
from ..kernels.api import Array, KVCache
from ..messages import Moved, TierUse, Transfer

logger = logging.getLogger("octavo")

RAM, FILE = 0, 1

MAX_ROWS = 1 << 20
"""Of a tier, whatever its budget: lists of them cost memory, too."""


class Tiers:
    """RAM and file have a row for each slot, together.

    Memory and file grow when they are first used. The file has no name: it is gone with the
    process, however that ends. What could not be written is not there: whoever comes for it
    computes it again.
    """

    def __init__(self, config: CacheConfig, kv_cache: KVCache) -> None:
        """Raises ConfigError if a tier does not hold one block, or can't be had."""
        self.kv_cache = kv_cache
        self.block_nbytes = nbytes = kv_cache.block_nbytes
        budgets = (config.ram_tier_memory, config.file_tier_memory)
        for name, value in zip(("ram_tier_memory", "file_tier_memory"), budgets, strict=True):
            if 0 < value < nbytes:
                raise ConfigError(name, value, f"0, or at least one block of {nbytes:,} bytes")
        ram, file = (min(value // nbytes, MAX_ROWS) for value in budgets)
        self.num_slots = (ram, file)
        try:
            self._ram = np.empty((ram, nbytes), np.uint8)  # resident when written
        except (MemoryError, ValueError):  # ValueError: past all addresses
            wanted = "smaller: the system refuses so much"
            raise ConfigError("ram_tier_memory", config.ram_tier_memory, wanted) from None
        self._block = np.empty(nbytes, np.uint8)
        self._rows: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """The row of each slot that is in RAM, and of each in the file; oldest first."""
        self._free = (list(range(ram))[::-1], list(range(file))[::-1])
        """Rows of either that are free: the last one given back leaves first."""
        self._took: dict[tuple[str, int], tuple[int, float]] = {}
        """Blocks and seconds of the step, by kind and tier."""
        self._moved: dict[tuple[str, int], tuple[int, float]] = {}
        """The same since the start."""
        self._is_failing = False
        """The last write to the file failed, and that was said."""
        self._file: int | None = None
        try:
            if file:
                with tempfile.TemporaryFile(dir=config.file_tier_dir) as opened:
                    self._file = os.dup(opened.fileno())
        except OSError as error:
            where = config.file_tier_dir or tempfile.gettempdir()
            wanted = f"a folder that can be written: {error.strerror}"
            raise ConfigError("file_tier_dir", where, wanted) from None

    def use(self) -> TierUse:
        """How full RAM and file are; from any thread."""
        num_used = (len(self._rows[RAM]), len(self._rows[FILE]))
        return TierUse(self.block_nbytes, self.num_slots, num_used, self._moved.copy())

    def close(self) -> None:
        """Give back RAM and file."""
        self._ram = self._ram[:0].copy()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def move(self, transfers: Sequence[Transfer]) -> tuple[set[int], tuple[Moved, ...]]:
        """Do these in order. Returns blocks that could not be loaded, and what it took."""
        lost: set[int] = set()
        self._took = {}
        num_done = 0
        try:
            for kind, source, target in transfers:
                start = perf_counter()
                is_lost = source in lost and kind in ("copy", "store")  # of what was lost
                tier = None if is_lost else self._move(kind, source, target)
                if tier is not None:
                    self._note(kind, tier, start)
                elif kind != "store":
                    lost.add(target)
                num_done += 1
        except BaseException:  # Ctrl-C: what was not stored must not be read
            for kind, _, target in transfers[num_done:]:
                if kind in ("store", "drop"):
                    self.drop(target)
            raise
        for key, (num, seconds) in self._took.items():
            num_before, seconds_before = self._moved.get(key, (0, 0.0))
            self._moved[key] = (num_before + num, seconds_before + seconds)
        took = self._took.items()
        return lost, tuple(Moved(*key, num, round(seconds * 1e6)) for key, (num, seconds) in took)

    def _note(self, kind: str, tier: int, start: float) -> None:
        num_blocks, seconds = self._took.get((kind, tier), (0, 0.0))
        self._took[kind, tier] = (num_blocks + 1, seconds + perf_counter() - start)

    def _move(self, kind: str, source: int, target: int) -> int | None:
        """The tier that took part; None if there was nothing to load."""
        if kind == "store":
            return self.fill(target, partial(self.kv_cache.save_block, source))
        if kind == "drop":
            return self.drop(target)
        in_tier = kind == "load"
        tier = FILE if in_tier and source in self._rows[FILE] else RAM
        block = self.read(source, in_tier)
        if block is None:
            return None
        self.kv_cache.restore_block(target, block)
        return tier

    def read(self, place: int, in_tier: bool) -> Array | None:
        """A block of the pool, or of a slot; valid until the next call. None: unreadable."""
        if not in_tier:
            self.kv_cache.save_block(place, self._block)
            return self._block
        if place in self._rows[RAM]:
            block: Array = self._ram[self._rows[RAM][place]]
            return block
        row = self._rows[FILE].get(place)
        if row is None or self._file is None:
            return None
        try:
            num_bytes = os.preadv(self._file, [self._block.data], row * len(self._block))
        except OSError as error:
            logger.error("reading K/V from the file tier failed: %s", error)
            return None
        return self._block if num_bytes == len(self._block) else None

    def fill(self, slot: int, write: Callable[[Array], object]) -> int:
        """Have `write` put a block into a slot. The tier that took part: the file where another
        block had to move there."""
        self.drop(slot)
        tier = RAM if self._free[RAM] else FILE
        if tier == FILE and self._rows[RAM]:
            start = perf_counter()
            oldest, row = next(iter(self._rows[RAM].items()))
            self._write_file(oldest, self._ram[row])
            self._free[RAM].append(self._rows[RAM].pop(oldest))
            self._note("demote", FILE, start)
        if self._free[RAM]:
            write(self._ram[self._free[RAM][-1]])
            self._rows[RAM][slot] = self._free[RAM].pop()
        else:
            write(self._block)
            self._write_file(slot, self._block)
        return tier

    def drop(self, slot: int) -> int:
        """Nobody needs what is in this slot any more. The tier that it was in."""
        tier = FILE if slot in self._rows[FILE] else RAM
        if slot in self._rows[tier]:
            self._free[tier].append(self._rows[tier].pop(slot))
        return tier

    def _write_file(self, slot: int, block: Array) -> None:
        """If that fails, the slot is in no tier."""
        assert self._file is not None
        row = self._free[FILE][-1]
        try:
            written = os.pwrite(self._file, block.data, row * len(block))
            if written != len(block):
                raise OSError(f"{written} of {len(block)} bytes were written")
        except OSError as error:
            if not self._is_failing:
                logger.error("storing K/V in the file tier failed; they are dropped: %s", error)
            self._is_failing = True
            return
        self._is_failing = False
        self._rows[FILE][slot] = self._free[FILE].pop()

    def describe(self) -> str:
        """For the start-up report."""
        ram, file = (n * self.block_nbytes / 2**20 for n in self.num_slots)
        return f"{ram:,.0f} MiB of RAM and {file:,.0f} MiB in a file below the pool"
