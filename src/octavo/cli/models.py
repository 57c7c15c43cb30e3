"""octavo models: what is known and what is in the cache; `fetch` brings a model there."""

from __future__ import annotations

import argparse

from .options import DEFAULT_MODEL


def run(args: argparse.Namespace) -> int:
    """List, or fetch one model (by default the default one)."""
    from ..weights.sources import list_models, open_checkpoint

    if args.action == "fetch":
        checkpoint = open_checkpoint(args.name or DEFAULT_MODEL)
        print(checkpoint.path)
        return 0
    for row in list_models():
        print(row)
    return 0
