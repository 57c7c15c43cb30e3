"""Where Octavo keeps what it can make or fetch again: models, and weights packed for a machine."""

from __future__ import annotations

import os
from pathlib import Path

PACKED_SUFFIX = ".packed"


def cache_folder() -> Path:
    """$OCTAVO_CACHE, else octavo under $XDG_CACHE_HOME or ~/.cache. It need not exist."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "octavo"


def packed_folder() -> Path:
    """Folder of packed weights (kernels/cpu/packed.py): $OCTAVO_PACKED, else in the cache."""
    return Path(os.environ.get("OCTAVO_PACKED") or cache_folder() / "packed")


def packed_files() -> list[tuple[Path, int]]:
    """Files of packed weights with their sizes, the one used last first."""
    found = []
    for path in packed_folder().glob("*" + PACKED_SUFFIX):
        try:
            status = path.stat()
        except OSError:  # another process removed it
            continue
        found.append((status.st_mtime, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found, reverse=True)]
