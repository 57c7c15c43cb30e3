"""Tokenizer from tokenizer.json (and tokenizer_config.json) of a Hugging Face folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import pre_tokenizers

from ..errors import ModelLoadError
from .vocabulary import ControlToken, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def vocabulary_from_json(text: str, config: Mapping[str, Any]) -> Vocabulary:
    """Build from the text of tokenizer.json; `config` is tokenizer_config.json.

    Raises ModelLoadError for a broken file, and for kinds that are neither byte-level nor
    SentencePiece.
    """
    try:
        native = NativeTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"tokenizer.json can't be read: {error}") from error
    native.no_truncation()
    native.no_padding()
    begins, ends = _added_around(native)
    native.encode_special_tokens = True  # control tokens are found by us; see Tokenizer.encode
    added = native.get_added_tokens_decoder()
    named = {name: _named_id(native, config, name) for name in ("bos", "eos", "unk", "pad")}
    control = {
        token.content: ControlToken(token_id, token.lstrip, token.rstrip)
        for token_id, token in added.items()
        if token.special or token_id in (named["bos"], named["eos"])
    }
    bos = named["bos"] if named["bos"] is not None or not begins else begins[0]
    byte_level = _is_byte_level(native)
    return Vocabulary(
        native=native,
        size=max(native.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1),
        control_tokens=control,
        literal_ids=frozenset(added),
        byte_level=byte_level,
        space_prefix="none" if byte_level else _take_space_prefix(native),
        bos_token_id=bos,
        eos_token_id=named["eos"],
        unk_token_id=named["unk"],
        pad_token_id=named["pad"],
        add_bos=bool(config.get("add_bos_token", bos in begins)) and bos is not None,
        add_eos=bool(config.get("add_eos_token", named["eos"] in ends)),
    )


def _added_around(native: NativeTokenizer) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and after a text."""
    bare = native.encode("a", add_special_tokens=False).ids
    full: list[int] = native.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _named_id(native: NativeTokenizer, config: Mapping[str, Any], name: str) -> int | None:
    """Id of "bos_token" and the like: a string, or a dict with the string in it."""
    value = config.get(f"{name}_token")
    if isinstance(value, dict):
        value = value.get("content")
    token_id: int | None = native.token_to_id(value) if isinstance(value, str) else None
    return token_id


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A decoder, normaliser or pre-tokeniser as plain data, sequences flattened."""
    if component is None:
        return
    data = json.loads(component.__getstate__())
    queue = [data]
    while queue:
        part = queue.pop(0)
        inner = part.get("decoders") or part.get("normalizers") or part.get("pretokenizers")
        if part.get("type") == "Sequence":
            queue = [*(inner or []), *queue]
        else:
            yield part


def _is_byte_level(native: NativeTokenizer) -> bool:
    kinds = {part["type"] for part in _parts(native.decoder)}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"Metaspace", "ByteFallback"}:
        return False
    raise ModelLoadError(
        f"tokenizer.json has a decoder of kind {sorted(kinds) or None}; Octavo reads byte-level "
        "BPE (ByteLevel) and SentencePiece (Metaspace or ByteFallback)"
    )


def _take_space_prefix(native: NativeTokenizer) -> str:
    """Which rule puts a space before a text.

    A "first" rule means the first piece of the whole text, which the library can't see when
    it gets the pieces one by one: it is switched off there, and Tokenizer applies it.
    """
    if any(part["type"] == "Prepend" for part in _parts(native.normalizer)):
        return "always"
    for part in _parts(native.pre_tokenizer):
        if part["type"] == "Metaspace":
            scheme = str(part.get("prepend_scheme", "always"))
            if scheme == "first":
                _switch_off_prefix(native.pre_tokenizer)
            return {"never": "none"}.get(scheme, scheme)
    return "none"


def _switch_off_prefix(component: Any) -> None:
    if isinstance(component, pre_tokenizers.Metaspace):
        component.prepend_scheme = "never"
    elif isinstance(component, pre_tokenizers.Sequence):
        for index in range(len(json.loads(component.__getstate__())["pretokenizers"])):
            _switch_off_prefix(component[index])
