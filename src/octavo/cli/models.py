"""octavo models: what is known and what is in the cache; `fetch` brings a model there."""

from __future__ import annotations

import argparse
import sys

from .options import DEFAULT_MODEL


def run(args: argparse.Namespace) -> int:
    """List, or fetch one model (by default the default one)."""
    from ..weights.fetch import cache_problem
    from ..weights.sources import list_models, open_checkpoint

    if args.action == "fetch":
        checkpoint = open_checkpoint(args.name or DEFAULT_MODEL, verify=True)
        print(checkpoint.path)
        return 0
    rows = list_models()
    width = max(len(row.alias) for row in rows)
    for row in rows:
        size = f"{row.num_bytes / 1e6:,.0f} MB"
        state = str(row.path) if row.is_cached else "not fetched: octavo models fetch " + row.alias
        print(f"{row.alias:{width}}  {size:>9}  {row.description}\n{'':{width}}  {state}")
    if problem := cache_problem():
        print(f"octavo: {problem}", file=sys.stderr)
        return 1
    return 0
