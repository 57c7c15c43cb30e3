"""Laws of the tokenizer: ids as the original's, no accidental control token, bytes kept."""

from __future__ import annotations

import itertools
import json
import logging
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.tiny_tokenizer import (
    BOS,
    EOS,
    byte_level_tokens,
    gguf_spec,
    json_spec,
    scripted,
    spm_spec,
)
from octavo.checkpoint import TokenizerSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.tokenizer_gguf import PRE_TOKENIZERS, vocabulary_from_gguf
from octavo.engine.vocabulary import byte_alphabet
from octavo.errors import ModelLoadError, RequestError
from octavo.weights.sources import open_checkpoint

ORACLE = json.loads(
    (Path(__file__).parent.parent / "fixtures" / "tokenizer_oracle.json").read_text("utf-8")
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
LOOKALIKES = st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<s>", "</s>", "<", "|>", "<0x41>"])
AWKWARD = st.lists(st.one_of(TEXT, LOOKALIKES), max_size=6).map("".join)
BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


@pytest.fixture(scope="module")
def smollm2(model_file: Path) -> Tokenizer:
    return Tokenizer(open_checkpoint(str(model_file)).tokenizer)


@pytest.mark.model
def test_real_model_gives_the_ids_of_the_original_tokenizer(smollm2: Tokenizer) -> None:
    """C85: digits, accents, CJK, tabs, code and white space."""
    expected = ORACLE["smollm2"]["ids"]
    assert {text: smollm2.encode(text) for text in expected} == expected
    assert {text: smollm2.decode(ids) for text, ids in expected.items()} == {t: t for t in expected}


@pytest.mark.model
def test_real_model_gives_the_chats_of_the_original_template(smollm2: Tokenizer) -> None:
    """Text and ids of whole chats, and one BOS at the start (C86)."""
    for chat in ORACLE["smollm2"]["chats"]:
        assert smollm2.render_chat(chat["messages"]) == chat["text"]
        assert smollm2.apply_chat_template(chat["messages"]) == chat["ids"]
        assert chat["ids"].index(smollm2.bos_token_id) == 0


@pytest.mark.parametrize("pre", sorted(ORACLE["words"]))
def test_each_pre_tokenizer_cuts_words_as_its_published_rule(pre: str) -> None:
    """C85: the words of every known pre-type, against another regular-expression engine."""
    native = vocabulary_from_gguf(gguf_spec(pre=pre).gguf).native
    for text, expected in ORACLE["words"][pre].items():
        cut = native.pre_tokenizer.pre_tokenize_str(text)
        words = [bytes(BYTE_OF[c] for c in word).decode() for word, _ in cut]
        assert words == expected


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder", "smollm", "qwen2"])
def test_digits_stand_alone_where_the_model_was_trained_so(pre: str) -> None:
    """C85: "1234567" is seven words."""
    native = vocabulary_from_gguf(gguf_spec(pre=pre).gguf).native
    assert [w for w, _ in native.pre_tokenizer.pre_tokenize_str("1234567")] == list("1234567")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@settings(max_examples=20)
@given(text=AWKWARD)
def test_every_pre_type_gives_back_any_text(pre: str, text: str) -> None:
    """No rule may lose a character (those that compose characters may compose them)."""
    tokenizer = tokenizer_for(pre)
    back = tokenizer.decode(tokenizer.encode(text, parse_special=False))
    if PRE_TOKENIZERS[pre].nfc:
        text = unicodedata.normalize("NFC", text)
    assert back == text


_tokenizers: dict[str, Tokenizer] = {}


def tokenizer_for(pre: str) -> Tokenizer:
    if pre not in _tokenizers:
        _tokenizers[pre] = Tokenizer(gguf_spec(pre=pre, add_bos_token=False))
    return _tokenizers[pre]


def test_an_unknown_pre_type_is_refused_and_a_missing_one_is_loud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C85: never a silent guess."""
    with pytest.raises(ModelLoadError, match="no-such-rule"):
        Tokenizer(gguf_spec(pre="no-such-rule"))
    with caplog.at_level(logging.WARNING):
        Tokenizer(gguf_spec(pre=None))
    assert "pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    "broken",
    [
        {"model": "bert"},
        {"model": None},
        {"tokens": None},
        {"token_type": [1, 1]},
        {"merges": ["nospace"]},
        {"merges": ["no such"]},
    ],
)
def test_broken_metadata_says_what_is_wrong(broken: dict[str, Any]) -> None:
    """No traceback from a library for a broken file."""
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml"):
        Tokenizer(gguf_spec(**broken))
    with pytest.raises(ModelLoadError, match="scores"):
        Tokenizer(spm_spec(scores=None))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer(TokenizerSpec(kind="tokenizer.json", tokenizer_json="{"))


@given(text=AWKWARD)
def test_both_file_formats_give_the_same_ids(text: str) -> None:
    """tokenizer.json and GGUF of one tokenizer; a truncation in the file is not applied."""
    for parse_special in (True, False):
        ids = [t.encode(text, parse_special=parse_special) for t in (FROM_JSON, FROM_GGUF)]
        assert ids[0] == ids[1]
        assert FROM_JSON.decode(ids[0], skip_special_tokens=False) == text


FROM_JSON, FROM_GGUF = Tokenizer(json_spec()), Tokenizer(gguf_spec())
SPM = Tokenizer(spm_spec())


@given(text=AWKWARD)
def test_plain_text_never_becomes_a_control_token(text: str) -> None:
    """C100: parse_special=False reads lookalikes as text, in every kind of tokenizer."""
    for tokenizer in (FROM_JSON, FROM_GGUF, SPM):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert not tokenizer.special_ids & set(ids)


@given(text=AWKWARD.filter(lambda text: not text.startswith("<s>")))
def test_sentencepiece_round_trip(text: str) -> None:
    """The space put before a text, and again after control tokens, is taken off again."""
    ids = SPM.encode(text)
    assert ids[0] == SPM.bos_token_id
    assert SPM.decode(ids, skip_special_tokens=False) == "<s>" + text


def naive_sentencepiece(text: str) -> list[int]:
    """Merge the neighbours that make the best piece, leftmost first, until none do."""
    gguf = spm_spec().gguf
    tokens, types = gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.token_type"]
    ids = {t: i for i, t in enumerate(tokens) if types[i] == 1}
    score = gguf["tokenizer.ggml.scores"]
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while pairs := [
        (score[ids[a + b]], -i)
        for i, (a, b) in enumerate(itertools.pairwise(symbols))
        if a + b in ids
    ]:
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result: list[int] = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return result


SCRAPS = st.sampled_from(["hel", "hello", "wor", "ld", "s>", *"helowrd ▁Aé😊\n"])


@given(text=st.lists(SCRAPS, max_size=12).map("".join))
def test_sentencepiece_merges_as_the_definition_says(text: str) -> None:
    """Scores become merges: the fast path against the definition, byte fallback included."""
    assert SPM.encode(text, add_special_tokens=False) == naive_sentencepiece(text)


def test_sentencepiece_without_a_space_prefix() -> None:
    """tokenizer.ggml.add_space_prefix false: the text alone."""
    bare = Tokenizer(spm_spec(add_space_prefix=False, add_bos_token=False))
    assert bare.decode(bare.encode("hello")) == "hello"
    assert bare.encode("hello") != SPM.encode("hello", add_special_tokens=False)
    assert bare.decode(bare.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("spec", "begins_with_bos"),
    [
        (gguf_spec(add_bos_token=True), True),
        (gguf_spec(add_bos_token=False), False),
        (gguf_spec(), False),
        (gguf_spec(pre="llama-bpe"), True),
        (gguf_spec(pre="llama-bpe", add_bos_token=False), False),
        (json_spec(add_bos=True), True),
        (json_spec(add_bos=False), False),
        (spm_spec(), True),
        (spm_spec(add_bos_token=False), False),
    ],
)
def test_bos_as_the_file_says_and_never_twice(spec: TokenizerSpec, begins_with_bos: bool) -> None:
    """C86: for plain prompts, and for prompts that begin with BOS as text."""
    tokenizer = Tokenizer(spec)
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.encode("hello").count(bos) == begins_with_bos
    assert tokenizer.encode("").count(bos) == begins_with_bos
    assert tokenizer.encode("<s>hello").count(bos) == 1
    assert tokenizer.encode("<s><s>hello").count(bos) == 2, "what the user wrote stays"
    assert tokenizer.encode("hello", add_special_tokens=False).count(bos) == 0


def test_eos_is_added_where_the_file_says() -> None:
    """C86: add_eos_token, and not twice."""
    tokenizer = Tokenizer(gguf_spec(add_eos_token=True))
    assert tokenizer.encode("hello")[-1] == EOS
    assert tokenizer.encode("hello<|im_end|>").count(EOS) == 1
    assert EOS not in tokenizer.apply_chat_template([{"role": "user", "content": "x"}])[-1:]


def test_white_space_around_control_tokens_is_swallowed_where_they_say_so() -> None:
    """lstrip and rstrip of added tokens, as Hugging Face has them."""
    spec = json_spec()
    data = json.loads(spec.tokenizer_json)
    data["added_tokens"][2].update(lstrip=True, rstrip=True)
    strips = Tokenizer(TokenizerSpec(kind="tokenizer.json", tokenizer_json=json.dumps(data)))
    ids = strips.encode("a \n<|im_end|>  b <s> c")
    assert strips.decode(ids, skip_special_tokens=False) == "a<|im_end|>b <s> c"


def test_the_first_rule_of_a_space_prefix_means_the_start_of_the_text() -> None:
    """Metaspace "first": no space after a control token, though pieces are encoded apart."""
    data = json.loads(json_spec().tokenizer_json)
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    data.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [metaspace]},
        decoder=metaspace,
        model={
            "type": "BPE",
            "vocab": {"<s>": 0, "▁": 1, "a": 2, "▁a": 3},
            "merges": [["▁", "a"]],
        },
        added_tokens=[{**data["added_tokens"][3], "id": 0}],
    )
    config = {"bos_token": "<s>", "add_bos_token": True}
    spec = TokenizerSpec(
        kind="tokenizer.json", tokenizer_json=json.dumps(data), tokenizer_config=config
    )
    tokenizer = Tokenizer(spec)
    assert tokenizer.encode("a<s>a a") == [0, 3, 0, 2, 3]
    assert tokenizer.encode(" a") == [0, 3]
    assert tokenizer.decode([0, 3]) == "a"
    assert tokenizer.decode([3]) == " a", "without BOS it may continue a text"


def test_the_ends_of_a_sequence_are_control_tokens_whatever_their_type() -> None:
    """C100: some files have no token types, or call BOS and EOS normal."""
    tokenizer = Tokenizer(gguf_spec(token_type=None))
    assert {BOS, EOS} == tokenizer.special_ids
    assert tokenizer.encode("<|im_end|>") == [EOS]
    assert EOS not in tokenizer.encode("<|im_end|>", parse_special=False)


def test_user_defined_tokens_are_found_in_any_text() -> None:
    """They are words of the model (<think>), not control tokens."""
    types = [3, 4, 3, 3] + [1] * (Tokenizer(gguf_spec()).vocab_size - 4)
    tokenizer = Tokenizer(gguf_spec(token_type=types))
    assert tokenizer.encode("a<|im_start|>b", parse_special=False)[1] == 1
    assert 1 not in tokenizer.special_ids
    assert tokenizer.decode([1]) == "<|im_start|>"


def test_added_tokens_are_written_as_they_stand() -> None:
    """C46: the text of a control or user-defined token is no byte alphabet."""
    tokens = [*byte_level_tokens(), "é à", "<é>"]
    types = [1] * (len(tokens) - 2) + [4, 3]
    tokenizer = Tokenizer(gguf_spec(tokens=tokens, token_type=types))
    assert tokenizer.encode("xé à<é>")[1:] == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.token_bytes(len(tokens) - 2) == "é à".encode()
    assert tokenizer.token_bytes(len(tokens) - 1) == "<é>".encode()


def test_bytes_of_tokens_are_exact() -> None:
    """C46: part of a character keeps its bytes; only its text is U+FFFD."""
    tokenizer, (half,) = scripted(b"\xf0\x9f")
    assert tokenizer.token_bytes(half) == b"\xf0\x9f"
    assert tokenizer.token_text(half) == "\ufffd"
    assert tokenizer.token_text(BOS) == "<s>"
    assert SPM.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.token_bytes(10**6) == b"", "padding rows of the embedding have no text"


def test_ids_outside_the_vocabulary_and_broken_text_are_the_users_error() -> None:
    """No traceback for a lone surrogate or a wild id."""
    for wild in (-1, FROM_GGUF.vocab_size):
        with pytest.raises(RequestError, match=str(FROM_GGUF.vocab_size - 1)):
            FROM_GGUF.decode([wild])
    with pytest.raises(RequestError, match="surrogate"):
        FROM_GGUF.encode("a\ud800b")
