"""Tokenizers small enough to read: 256 bytes, a few merges, four control tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.checkpoint import TokenizerSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.vocabulary import byte_alphabet

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
BOS = CONTROL.index("<s>")
EOS = CONTROL.index("<|im_end|>")
FIRST_BYTE = len(CONTROL)
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ã ©")
_ALPHABET = byte_alphabet()


def mapped(data: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    return "".join(_ALPHABET[byte] for byte in data)


def byte_level_tokens(extra: Sequence[bytes] = ()) -> list[str]:
    """Control tokens, then bytes in order, then merged words, then `extra` (never encoded to)."""
    tokens = [*CONTROL, *(mapped(bytes([byte])) for byte in range(256))]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    return tokens + [mapped(data) for data in extra if mapped(data) not in tokens]


def gguf_spec(extra: Sequence[bytes] = (), **changes: Any) -> TokenizerSpec:
    """A byte-level GGUF tokenizer; `changes` are keys below tokenizer.ggml (None: left out)."""
    tokens = byte_level_tokens(extra)
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "merges": list(MERGES),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **changes,
    }
    gguf = {f"tokenizer.ggml.{key}": v for key, v in metadata.items() if v is not None}
    return TokenizerSpec(kind="gguf", gguf=gguf, chat_template=CHATML)


def scripted(*pieces: bytes) -> tuple[Tokenizer, list[int]]:
    """A tokenizer that has these pieces as tokens, and their ids."""
    tokenizer = Tokenizer(gguf_spec(pieces))
    ids = {tokenizer.token_bytes(i): i for i in reversed(range(FIRST_BYTE, tokenizer.vocab_size))}
    return tokenizer, [ids[piece] for piece in pieces]


def json_spec(*, add_bos: bool = False, chat_template: str | None = CHATML) -> TokenizerSpec:
    """The same tokenizer as a tokenizer.json, with a BOS-adding post-processor if asked for."""
    vocab = {token: i for i, token in enumerate(byte_level_tokens())}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": t, "special": True, **flags} for i, t in enumerate(CONTROL)]
    bos = {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}
    text_alone = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text_alone],
        "pair": [text_alone, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": bos,
    }
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    data = {
        "version": "1.0",
        "truncation": {
            "max_length": 4,
            "stride": 0,
            "strategy": "LongestFirst",
            "direction": "Right",
        },
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [digits, {"type": "ByteLevel", **byte_level}],
        },
        "post_processor": template if add_bos else None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {"type": "BPE", "vocab": vocab, "merges": [m.split(" ") for m in MERGES]},
    }
    return TokenizerSpec(
        kind="tokenizer.json",
        tokenizer_json=json.dumps(data),
        tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}},
        chat_template=chat_template,
    )


SPM_WORDS = (
    "he",
    "ll",
    "hell",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "▁wor",
    "▁world",
    "ld",
    "▁▁",
    "é",
    "s>",
    "el",
)


def spm_spec(**changes: Any) -> TokenizerSpec:
    """A SentencePiece-BPE GGUF tokenizer: <unk> <s> </s>, 256 bytes, letters, a few words."""
    words = list(SPM_WORDS)
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABC,.!<>|_/"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    gguf = {f"tokenizer.ggml.{key}": v for key, v in metadata.items() if v is not None}
    template = "{% for m in messages %}{{ '<s>' + m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    return TokenizerSpec(kind="gguf", gguf=gguf, chat_template=template)
