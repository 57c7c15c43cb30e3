"""A file mapped into memory, read only: bytes arrive when touched and leave when released."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError

LENT_BYTES = 64 << 20


class MappedFile:
    """The bytes of one file. Raises ModelLoadError where the file can't be read or is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelLoadError(f"{path}: there is no such file") from None
        except ValueError:
            raise ModelLoadError(f"{path}: the file is empty; fetch it again") from None
        except OSError as error:
            raise ModelLoadError(f"{path}: can't be read: {error.strerror}") from None
        self.num_bytes = len(self.map)
        self._num_lent = 0

    def bytes_at(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """A view [num_bytes], without a copy; the caller has checked the bounds."""
        return np.frombuffer(self.map, np.uint8, num_bytes, offset)

    def lend(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """As bytes_at, for bytes that are read once and soon: release_all() lets go of them.

        So does a later call, so that no more than LENT_BYTES and one view stay resident; a view
        that is still in use then reads the file again.
        """
        if self._num_lent > LENT_BYTES:
            self.release_all()
        self._num_lent += num_bytes
        return self.bytes_at(offset, num_bytes)

    def release_all(self) -> None:
        """Let go of every page, those that the system brought in along with others, too."""
        self.release(0, self.num_bytes)
        self._num_lent = 0

    def release(self, offset: int, num_bytes: int) -> None:
        """Let go of pages that were read; they come back from the page cache if needed again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages of this range only
        end = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self.map.madvise(mmap.MADV_DONTNEED, start, end - start)
