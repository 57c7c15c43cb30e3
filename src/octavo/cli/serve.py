"""octavo serve: the HTTP server."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from .options import config_of, model_of, settings_of

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it. Settings are checked first, then the port is taken, then the
    model loads: nobody waits for a model to hear of a mistake."""
    config_of(args)
    from ..server.serve import serve

    return serve(
        lambda: _load(args),
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get("OCTAVO_API_KEY"),
        served_model_names=args.served_model_name,
        shutdown_timeout=args.shutdown_timeout,
    )


def _load(args: argparse.Namespace) -> AsyncLLM:
    from ..engine.async_llm import AsyncLLM

    return AsyncLLM(model_of(args), **settings_of(args))
