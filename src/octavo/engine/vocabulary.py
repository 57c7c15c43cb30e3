"""A tokenizer taken apart: what tokenizer.json and GGUF metadata both come down to.

The `tokenizers` library turns plain text into ids. Control tokens, the beginning and end of a
sequence, and the way back from ids to bytes are ours, so that no control token can appear by
accident and no byte gets lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer as NativeTokenizer

SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ControlToken(NamedTuple):
    """A token that no plain text may become, such as <|im_end|>."""

    token_id: int
    lstrip: bool = False
    """Swallows the white space before it."""
    rstrip: bool = False
    """Swallows the white space after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything about a tokenizer but its public interface."""

    native: NativeTokenizer
    """Encodes plain text only: it knows no control token and adds nothing."""

    size: int
    control_tokens: Mapping[str, ControlToken]
    literal_ids: frozenset[int]
    """Tokens whose bytes are their text as it stands: control and user-defined ones."""

    byte_level: bool
    """Characters stand for bytes (GPT-2); else pieces as SentencePiece writes them."""

    space_prefix: str = "none"
    """Where a space is put before the text: none, first (at its start) or always (also after
    every control token)."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    pad_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False

    def bytes_of(self, token_id: int) -> bytes:
        """Exact bytes of one token; empty past the end of the vocabulary (padding rows)."""
        piece = self.native.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self.literal_ids:
            return piece.encode()
        if self.byte_level:
            try:
                return piece.translate(_BYTE_OF_CHARACTER).encode("latin-1")
            except UnicodeEncodeError:
                return piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(SPACE_MARK, " ").encode()


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that byte-level vocabularies write for it (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    return {byte: shifted.get(byte, chr(byte)) for byte in range(256)}


_BYTE_OF_CHARACTER = {ord(character): byte for byte, character in byte_alphabet().items()}
