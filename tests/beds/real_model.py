"""Where tests find the real model file."""

from __future__ import annotations

import os
from pathlib import Path

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    """$OCTAVO_TEST_MODEL, or the file in octavo's cache. Fails, and says what to do, without it."""
    if given := os.environ.get("OCTAVO_TEST_MODEL"):
        path = Path(given)
    else:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = Path(os.environ.get("OCTAVO_CACHE") or f"{home}/octavo").expanduser()
        path = cache / "models" / MODEL_FILE
    if not path.is_file():
        advice = "run make setup, or set OCTAVO_TEST_MODEL to the file"
        raise FileNotFoundError(f"this test needs the model file {path}: {advice}")
    return path
