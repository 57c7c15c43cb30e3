"""octavo models: what is known and what is in the cache; `fetch` brings a model there, and
`clear` removes the packed weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .options import DEFAULT_MODEL


def run(args: argparse.Namespace) -> int:
    """List, fetch one model (by default the default one), or remove packed weights."""
    from ..cache_folder import packed_files, packed_folder
    from ..weights.fetch import cache_problem
    from ..weights.sources import list_models, open_checkpoint

    if args.action == "fetch":
        checkpoint = open_checkpoint(args.name or DEFAULT_MODEL, verify=True)
        print(checkpoint.path)
        return 0
    packed = packed_files()
    if args.action == "clear":
        for path, _ in packed:
            path.unlink(missing_ok=True)
        print(f"removed {_sum(packed)} from {packed_folder()}")
        return 0
    rows = list_models()
    width = max(len(row.alias) for row in rows)
    for row in rows:
        size = f"{row.num_bytes / 1e6:,.0f} MB"
        state = str(row.path) if row.is_cached else "not fetched: octavo models fetch " + row.alias
        print(f"{row.alias:{width}}  {size:>9}  {row.description}\n{'':{width}}  {state}")
    if packed:
        print(f"packed weights, made again when needed (octavo models clear): {_sum(packed)}")
        for path, nbytes in packed:
            print(f"{'':{width}}  {nbytes / 1e6:,.0f} MB  {path}")
    if problem := cache_problem():
        print(f"octavo: {problem}", file=sys.stderr)
        return 1
    return 0


def _sum(files: list[tuple[Path, int]]) -> str:
    return f"{len(files)} files, {sum(size for _, size in files) / 1e6:,.0f} MB"
