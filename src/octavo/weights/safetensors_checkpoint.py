"""A folder in Hugging Face form as a Checkpoint: configuration, tokenizer and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import Checkpoint, GenerationDefaults, StoredRows, TokenizerSpec
from ..errors import ModelLoadError
from .expected import check_config, check_tensors, expected_tensors
from .hf_config import Settings, model_config
from .safetensors import SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def open_hf_folder(folder: Path, name: str) -> Checkpoint:
    """Open a folder in Hugging Face form; no tensor is read.

    Raises ModelLoadError for a missing or malformed file, a missing shard or tensor, a wrong
    shape, or a feature that is not supported.
    """
    settings = _settings(folder / "config.json")
    config = model_config(settings)
    check_config(config, settings.path)
    weights = SafetensorsWeights(folder)
    check_tensors(config, weights, folder)
    for tensor, _ in expected_tensors(config):
        weights.check_readable(tensor)
    tokenizer = _tokenizer_spec(folder)
    return Checkpoint(
        path=folder,
        name=name,
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        generation=_generation_defaults(folder, settings, tokenizer, config.vocab_size),
    )


class SafetensorsWeights:
    """Weights protocol over one or several safetensors files; load is safe from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, SafetensorsFile] = {}
        for file, wanted in _shards(folder).items():
            shard = SafetensorsFile(folder / file)
            for name in shard.tensors if wanted is None else wanted:
                if name not in shard.tensors:
                    raise ModelLoadError(
                        f"{folder}: {INDEX_FILE} says that {name} is in {file}, but it is not; "
                        "fetch the model again"
                    )
                self._files[name] = shard

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of(name).tensors[name].shape

    def load(self, name: str, *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        return self._file_of(name).load(name, out=out)

    def load_stored(self, name: str, kinds: frozenset[str]) -> StoredRows | None:
        return self._file_of(name).load_stored(name, kinds)

    def release(self) -> None:
        for file in self._files.values():
            file.release()

    def check_readable(self, name: str) -> None:
        """Raise ModelLoadError if a tensor is stored in a type that is not read."""
        self._file_of(name).check_readable(name)

    def _file_of(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise ModelLoadError(f"{self._folder}: there is no tensor {name}")
        return self._files[name]


def _shards(folder: Path) -> dict[str, list[str] | None]:
    """The files to open, with the tensors that the index places in each (None: all in the file)."""
    if (folder / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    index = folder / INDEX_FILE
    if not index.exists():
        raise ModelLoadError(
            f"{folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; of the weight formats "
            "only safetensors and GGUF are read"
        )
    shards: dict[str, list[str] | None] = {}
    for name, file in _settings(index).section("weight_map").values.items():
        # A plain name only: an index must not point outside of its folder.
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ModelLoadError(f"{index}: {name} is placed in {file!r}, which is no file name")
        names = shards.setdefault(file, [])
        assert names is not None
        names.append(name)
    missing = sorted(file for file in shards if not (folder / file).is_file())
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} of {len(shards)} weight files are missing: "
            f"{', '.join(missing[:8])}{' and more' if len(missing) > 8 else ''}; fetch them again"
        )
    return shards


def _settings(path: Path, *, required: bool = True) -> Settings:
    """A JSON file that holds an object; one that may be absent is empty then."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return Settings({}, path)
        raise ModelLoadError(
            f"{path.parent}: there is no {path.name}; a model folder holds config.json, "
            "tokenizer.json and safetensors (for a GGUF model give the .gguf file itself)"
        ) from None
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{path}: is not valid JSON; fetch it again") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return Settings(values, path)


def _text_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelLoadError(f"{path}: is not UTF-8 text; fetch it again") from None


def _tokenizer_spec(folder: Path) -> TokenizerSpec:
    if not (folder / "tokenizer.json").exists():
        raise ModelLoadError(
            f"{folder}: there is no tokenizer.json (a tokenizer.model alone is not read; "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
        )
    config = dict(_settings(folder / "tokenizer_config.json", required=False).values)
    special = _settings(folder / "special_tokens_map.json", required=False).values
    return TokenizerSpec(
        kind="tokenizer.json",
        tokenizer_json=_text_file(folder / "tokenizer.json"),
        tokenizer_config={**special, **config},
        chat_template=_chat_template(folder, config.get("chat_template")),
    )


def _chat_template(folder: Path, configured: Any) -> str | None:
    """chat_template.jinja wins; a list of named templates stands for its "default"."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _text_file(file)
    if isinstance(configured, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in configured
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _generation_defaults(
    folder: Path, config: Settings, tokenizer: TokenizerSpec, vocab_size: int
) -> GenerationDefaults:
    """generation_config.json over config.json; a tokenizer's eos_token always ends a generation."""
    settings = _settings(folder / "generation_config.json", required=False)
    source = settings if settings.has("eos_token_id") else config
    value = source.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise source.refusal("eos_token_id", "must be token ids")
    ids = [*ids, *_tokenizer_eos(tokenizer.tokenizer_config)]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ids)),
        sampling={key: settings.real(key) for key in SAMPLING_KEYS if settings.has(key)},
    )


def _tokenizer_eos(tokenizer_config: dict[str, Any]) -> list[int]:
    """The id of tokenizer_config.json's eos_token, where its table of added tokens names it."""
    eos = tokenizer_config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = tokenizer_config.get("added_tokens_decoder")
    if not isinstance(text, str) or not isinstance(added, dict):
        return []
    return [
        int(token_id)
        for token_id, entry in added.items()
        if isinstance(entry, dict) and entry.get("content") == text and token_id.isdecimal()
    ]
