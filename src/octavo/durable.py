"""A file that is replaced as a whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import BinaryIO


def refusal(path: str) -> str | None:
    """What a path has to be that can be replaced so; None: it is."""
    place = Path(path)
    if place.exists() and not place.is_file():  # opening a pipe would wait for its other end
        return "a file"
    is_open = os.access(place.absolute().parent, os.W_OK | os.X_OK)
    return None if is_open else "in a folder that can be written"


class Postponed(Exception):
    """A file was not replaced, since there is something better to do."""


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends, and is on disk then.

    It grows beside the old one, as `path`.new, readable by its owner alone. After an error, a kill
    or a power cut the old one is still there; an error leaves nothing else, and what a killed
    process left is written over. Raises OSError, also while another process writes.
    """
    new = path + ".new"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), os.stat(new))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:  # or it was, a moment ago, and has put its file into place
            raise OSError("another process writes it now")
        os.fchmod(file.fileno(), 0o600)  # whoever made it
        file.truncate()
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            os.unlink(new)  # a part serves nobody, and the disk may be full
            raise
    folder = os.open(Path(path).absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the name is on disk, too
    finally:
        os.close(folder)
