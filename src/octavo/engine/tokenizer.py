"""Text to token ids and back.

Control tokens (<|im_end|> and its like) are found here and not by the library, which is only ever
given plain text: what a user wrote can never become one of them (C100).
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError, RequestError
from .vocabulary import SPACE_MARK, ControlToken, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..checkpoint import TokenizerSpec
    from .chat_messages import Placeholders
    from .chat_template import ChatTemplate


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads."""

    def __init__(self, spec: TokenizerSpec) -> None:
        """Build from a checkpoint. Raises ModelLoadError for kinds that are not known."""
        self._vocabulary = _vocabulary_of(spec)
        self._chat_template_source = spec.chat_template
        self._control_pattern = _pattern_of(self._vocabulary.control_tokens)
        self._bytes_by_id: dict[int, bytes] = {}
        self.vocab_size = self._vocabulary.size
        self.bos_token_id = self._vocabulary.bos_token_id
        self.eos_token_id = self._vocabulary.eos_token_id
        self.special_ids = frozenset(t.token_id for t in self._vocabulary.control_tokens.values())
        self._space_dropped_after = self._ids_before_a_prefix()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        add_special_tokens puts BOS (and EOS) around it where the model wants them; a BOS that the
        text begins with already is not doubled (C86). parse_special=False reads "<|im_end|>" as
        seven plain characters and more. Raises RequestError for a text that is not Unicode.
        """
        ids = self._encode(text, parse_special=parse_special)
        if not add_special_tokens:
            return ids
        eos = self._vocabulary.eos_token_id
        if self._vocabulary.add_eos and eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return self._with_bos(ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        The space that SentencePiece puts before a text is taken off after BOS (or another
        control token); ids without BOS may continue a text, so theirs stays.
        Raises RequestError for an id outside the vocabulary.
        """
        parts: list[bytes] = []
        previous: int | None = None
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                wanted = f"a token id from 0 to {self.vocab_size - 1}"
                raise RequestError(f"{token_id} is not {wanted}", param="tokens")
            parts.append(self.text_bytes(token_id, previous, skip_special=skip_special_tokens))
            previous = token_id
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token; empty for an id past the vocabulary (a padding row)."""
        data = self._bytes_by_id.get(token_id)
        if data is None:
            data = self._bytes_by_id[token_id] = self._vocabulary.bytes_of(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def text_bytes(self, token_id: int, previous: int | None, *, skip_special: bool) -> bytes:
        """What a token adds to a text after the token `previous`: the one rule of decoding."""
        if token_id in self.special_ids:
            return b"" if skip_special else self.token_bytes(token_id)
        data = self.token_bytes(token_id)
        if previous in self._space_dropped_after and data.startswith(b" "):
            return data[1:]
        return data

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own chat template, if it has one."""
        if self._chat_template_source is None:
            return None
        return self._template_from(self._chat_template_source)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Token ids of a chat, with exactly one BOS where the model wants one.

        Control tokens come from the template alone; in messages they stay text. `options` are
        chat_template, a template instead of the model's own, and those of ChatTemplate.render.
        Raises RequestError for messages that are malformed or that the template refuses.
        """
        text, placeholders = self._render(messages, **options)
        return self._with_bos(self._encode(text, placeholders=placeholders))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Text that apply_chat_template encodes; in it, control tokens and text look alike."""
        text, placeholders = self._render(messages, **options)
        return placeholders.restore(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> tuple[str, Placeholders]:
        if not isinstance(chat_template, str | None):
            raise RequestError("chat_template must be text", param="chat_template")
        template = (
            self.chat_template if chat_template is None else self._template_from(chat_template)
        )
        if template is None:
            message = "this model has no chat template: use completions, or give a chat_template"
            raise RequestError(message, param="messages")
        return template.render(messages, **options)

    def _template_from(self, source: str) -> ChatTemplate:
        from .chat_template import ChatTemplate  # jinja2 costs 50 ms that plain prompts don't need

        vocabulary = self._vocabulary
        ids = {
            "bos_token": vocabulary.bos_token_id,
            "eos_token": vocabulary.eos_token_id,
            "unk_token": vocabulary.unk_token_id,
            "pad_token": vocabulary.pad_token_id,
        }
        variables = {
            name: self.token_text(token_id)
            for name, token_id in ids.items()
            if token_id is not None
        }
        return ChatTemplate(source, variables, tuple(vocabulary.control_tokens))

    def _encode(
        self, text: str, *, parse_special: bool = True, placeholders: Placeholders | None = None
    ) -> list[int]:
        """Ids of a text: control tokens by our pattern, what lies between by the library."""
        ids: list[int] = []
        position = 0

        def plain(end: int) -> None:
            ids.extend(self._encode_plain(text[position:end], placeholders, first=position == 0))

        if parse_special:
            control_tokens = self._vocabulary.control_tokens
            for match in self._control_pattern.finditer(text):
                plain(match.start())
                found = control_tokens.get(match[0]) or control_tokens[match[0].strip()]
                ids.append(found.token_id)
                position = match.end()
        plain(len(text))
        return ids

    def _encode_plain(
        self, piece: str, placeholders: Placeholders | None, *, first: bool
    ) -> list[int]:
        """Ids of a text without control tokens; `first`: nothing stands before it."""
        if placeholders is not None:
            piece = placeholders.restore(piece)
        if not piece:
            return []
        wants_space = first and self._vocabulary.space_prefix == "first"
        if wants_space and not piece.startswith((" ", SPACE_MARK)):
            piece = " " + piece
        try:
            ids: list[int] = self._vocabulary.native.encode(piece, add_special_tokens=False).ids
            return ids
        except (TypeError, UnicodeEncodeError) as error:  # a lone half of a surrogate pair
            message = "the text is not valid Unicode: it has half of a surrogate pair"
            raise RequestError(message, param="prompt") from error

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._vocabulary.bos_token_id
        if self._vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def _ids_before_a_prefix(self) -> frozenset[int | None]:
        """Tokens after which encoding puts a space that is not in the text."""
        rule = self._vocabulary.space_prefix
        if rule == "always":
            return self.special_ids
        bos = self._vocabulary.bos_token_id
        return frozenset((bos,) if rule == "first" and bos is not None else ())


def _vocabulary_of(spec: TokenizerSpec) -> Vocabulary:
    if spec.kind == "gguf":
        from .tokenizer_gguf import vocabulary_from_gguf

        return vocabulary_from_gguf(spec.gguf)
    if spec.kind == "tokenizer.json":
        from .tokenizer_json import vocabulary_from_json

        return vocabulary_from_json(spec.tokenizer_json, spec.tokenizer_config)
    raise ModelLoadError(f"a tokenizer of kind {spec.kind!r}; Octavo reads tokenizer.json and gguf")


def _pattern_of(control_tokens: Mapping[str, ControlToken]) -> re.Pattern[str]:
    """Finds control tokens, the longest first, with the white space that they swallow."""
    longest_first = sorted(control_tokens, key=len, reverse=True)
    branches = (
        (r"\s*" if control_tokens[text].lstrip else "")
        + re.escape(text)
        + (r"\s*" if control_tokens[text].rstrip else "")
        for text in longest_first
    )
    return re.compile("|".join(branches) or r"(?!)")
