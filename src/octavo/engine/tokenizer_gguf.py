"""Tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") and SentencePiece ("llama").

Pre-tokenisers are those of the original tokenizer.json files; their names are llama.cpp's.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as NativeTokenizer

from ..errors import ModelLoadError
from .vocabulary import SPACE_MARK, ControlToken, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_CL100K_TAIL}"
QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_CL100K_TAIL}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F "
    "386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 "
    "1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 "
    "2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 "
    "2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Code points of the cased letters that DeepSeek's rule lists (Unicode's L& of some years ago);
as numbers, since some of them change when an editor composes characters."""

_DEEPSEEK_LETTERS = (
    r"\s?["
    + re.sub("[0-9A-F]+", lambda code: chr(int(code[0], 16)), _CASED_LETTERS).replace(" ", "")
    + "]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"


class PreTokenizer(NamedTuple):
    """How text is cut into words before byte-pair merges: each rule cuts the pieces so far."""

    rules: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is itself a token is taken whole."""
    nfc: bool = False
    """Compose characters first (Unicode NFC)."""
    add_bos: bool = False
    """Begin with BOS where the file does not say."""


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", GPT2_WORDS))
_GPT2 = PreTokenizer((GPT2_WORDS,))
_LLAMA3 = PreTokenizer((LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((QWEN2_WORDS,), nfc=True)
_DEEPSEEK_LLM = PreTokenizer(
    (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _CJK, r"\p{N}")
)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]"))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS_GPT2),
    "command-r": _DIGITS_GPT2._replace(nfc=True),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((LLAMA3_WORDS,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "stablelm2": PreTokenizer((QWEN2_WORDS,)),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
}
"""Value of tokenizer.ggml.pre -> rules."""


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Build from the keys under "tokenizer." of a GGUF file.

    Raises ModelLoadError, with what to do, for a kind that is not known: a tokenizer that is
    nearly right gives text that is nearly right.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _array(metadata, "tokens")
    if not tokens:
        raise ModelLoadError("this GGUF file has no tokenizer (no tokenizer.ggml.tokens)")
    types = [int(kind) for kind in _array(metadata, "token_type")]
    if len(types) not in (0, len(tokens)):
        raise ModelLoadError(f"tokenizer.ggml: {len(tokens)} tokens, but {len(types)} types")
    types = types or [NORMAL] * len(tokens)
    if model == "gpt2":
        native, pre = _byte_level_bpe(metadata, tokens)
        space_prefix, add_bos = "none", pre.add_bos
    elif model == "llama":
        with_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        native = _sentencepiece_bpe(metadata, tokens, types, with_prefix=with_prefix)
        space_prefix, add_bos = ("always" if with_prefix else "none"), True
    else:
        message = f"tokenizer.ggml.model is {model!r}; Octavo reads gpt2 and llama"
        raise ModelLoadError(f"{message}. Use a model of the Llama family, or its HF folder")
    for name in ("bos", "eos", "eot"):  # some files call them normal tokens
        token_id = _token_id(metadata, name, len(tokens))
        if token_id is not None and types[token_id] == NORMAL:
            types[token_id] = CONTROL
    odd = [i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
    user_defined = [tokens[i] for i in odd if types[i] == USER_DEFINED]
    native.add_tokens([AddedToken(text, normalized=False) for text in user_defined])
    control = [i for i in odd if types[i] != USER_DEFINED and tokens[i]]
    return Vocabulary(
        native=native,
        size=len(tokens),
        control_tokens={tokens[i]: ControlToken(i) for i in control},
        literal_ids=frozenset(odd),
        byte_level=model == "gpt2",
        space_prefix=space_prefix,
        bos_token_id=_token_id(metadata, "bos", len(tokens)),
        eos_token_id=_token_id(metadata, "eos", len(tokens)),
        unk_token_id=_token_id(metadata, "unknown", len(tokens)),
        pad_token_id=_token_id(metadata, "padding", len(tokens)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def _array(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """An array of the file, whatever holds it (a list, numpy); [] where the file has none."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    return [] if value is None else list(value)


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    """The id of a named token; None where the file has none (also written as 2**32 - 1)."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return int(value) if value is not None and 0 <= int(value) < size else None


def pre_tokenizer_of(metadata: Mapping[str, Any]) -> PreTokenizer:
    """Rules named by tokenizer.ggml.pre. Missing: warns loudly; unknown: ModelLoadError (C85)."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning(
            "this GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): its text may be "
            "cut into wrong tokens and answers may be worse. Use a newer conversion of the model"
        )
        return PRE_TOKENIZERS["default"]
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelLoadError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that Octavo does not know (it knows "
            f"{known}). Use the model's Hugging Face folder with its tokenizer.json instead"
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str]
) -> tuple[NativeTokenizer, PreTokenizer]:
    pre = pre_tokenizer_of(metadata)
    merges = [tuple(line.split(" ")) for line in _array(metadata, "merges")]
    if set(map(len, merges)) - {2}:
        raise ModelLoadError("tokenizer.ggml.merges: each entry must be two tokens and one space")
    native = _bpe(tokens, merges, ignore_merges=pre.ignore_merges)
    *first, last = pre.rules
    steps: list[Any] = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in first]
    if last == GPT2_WORDS:  # the library knows these words by heart, and is quicker at them
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps.append(pre_tokenizers.Split(Regex(last), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    native.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        native.normalizer = normalizers.NFC()
    return native, pre


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], *, with_prefix: bool
) -> NativeTokenizer:
    scores = [float(score) for score in _array(metadata, "scores")]
    if len(scores) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml: {len(tokens)} tokens, but {len(scores)} scores")
    unk = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    native = _bpe(
        tokens,
        _merges_from_scores(tokens, types, scores),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if with_prefix else []
    native.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    return native


def _merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, ...]]:
    """Every way to make a normal piece of two, the piece with the best score first.

    Control and byte tokens are left out: no text may merge into them.
    """
    normal = {t: i for i, t in enumerate(tokens) if types[i] == NORMAL}
    found = [
        (-scores[token_id], len(text[:cut]), text[:cut], text[cut:])
        for text, token_id in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _bpe(tokens: Sequence[str], merges: list[Any], **options: Any) -> NativeTokenizer:
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    try:
        return NativeTokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"tokenizer.ggml: vocabulary and merges disagree: {error}") from error
