"""Token ids to text, one at a time, never splitting a character, at a cost that stays the same."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

MAX_RUN = 16
"""Tokens after which text is let go although the last of them ends inside a character."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Run(NamedTuple):
    """The fewest tokens whose bytes are whole characters (or proven not to be any)."""

    pieces: tuple[bytes, ...]
    """What each token adds to the text; empty for a control token that is not shown."""

    text: str
    carried: bytes = b""
    """Bytes of the text's first character that came with the run before (see MAX_RUN)."""


class Detokenizer:
    """Incremental form of Tokenizer.decode: the texts of all runs, joined, equal it exactly."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokens = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = _new_decoder("replace")
        self._previous: int | None = None
        self._pieces: list[bytes] = []
        self._text = ""
        self._carried = b""

    def push(self, token_id: int) -> list[Run]:
        """Take one token; returns the runs that it completes (0, 1 or 2)."""
        data = self._tokens.text_bytes(token_id, self._previous, skip_special=self._skip_special)
        self._previous = token_id
        runs: list[Run] = []
        pending = self._decoder.getstate()[0]
        if pending and data:
            # The next byte either goes on with the unfinished character or proves it broken; a
            # broken one belongs to the earlier tokens alone, and need not wait for this one.
            head = self._decoder.decode(data[:1])
            if head[:1] == "\ufffd" and pending + data[:1] != "\ufffd".encode():
                self._text += head[0]
                runs.append(self._close())
                self._carried = b""
                head = head[1:]
            self._text += head + self._decoder.decode(data[1:])
        else:
            self._text += self._decoder.decode(data)
        self._pieces.append(data)
        pending = self._decoder.getstate()[0]
        if not pending or (len(self._pieces) >= MAX_RUN and self._text):
            runs.append(self._close())
            self._carried = pending
        return runs

    def finish(self) -> list[Run]:
        """No token comes any more: what is left of a character becomes U+FFFD."""
        self._text += self._decoder.decode(b"", final=True)
        return [self._close()] if self._pieces or self._text else []

    def _close(self) -> Run:
        run = Run(tuple(self._pieces), self._text, self._carried)
        self._pieces, self._text = [], ""
        return run
