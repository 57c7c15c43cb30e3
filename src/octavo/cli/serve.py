"""octavo serve: the HTTP server."""

from __future__ import annotations

import argparse

from .options import config_of


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    config = config_of(args)
    from ..server.serve import serve

    serve(
        config,
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        served_model_name=args.served_model_name,
    )
    return 0
