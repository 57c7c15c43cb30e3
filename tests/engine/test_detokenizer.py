"""Laws of the detokenizer: whole characters, exact text, the same cost for each token."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.step_count import count_steps, memory_kept
from beds.tiny_tokenizer import FIRST_BYTE, gguf_spec, scripted, spm_spec
from octavo.engine.detokenizer import MAX_RUN, Detokenizer, Run
from octavo.engine.tokenizer import Tokenizer

BYTE_LEVEL, SPM = Tokenizer(gguf_spec()), Tokenizer(spm_spec())
BYTES = st.sampled_from([*b"\xf0\x9f\xab\xa0\xc3\xa9\xe2\x82\xacx", *b"\xef\xbf\xbd\xff\x80\xed"])


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special)
    runs = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]
    assert sum(len(run.pieces) for part in runs for run in part) == len(ids)
    return ["".join(run.text for run in part) for part in runs]


def any_ids(tokenizer: Tokenizer, first_byte: int) -> st.SearchStrategy[list[int]]:
    byte_ids = BYTES.map(lambda byte: first_byte + byte)
    return st.lists(st.one_of(st.integers(0, tokenizer.vocab_size - 1), byte_ids), max_size=40)


@given(ids=any_ids(BYTE_LEVEL, FIRST_BYTE), skip_special=st.booleans())
def test_joined_deltas_are_the_decoded_whole(ids: list[int], skip_special: bool) -> None:
    """Any tokens, valid UTF-8 or not, control tokens in between or not."""
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special)
    assert "".join(deltas(BYTE_LEVEL, ids, skip_special=skip_special)) == whole


@given(ids=any_ids(SPM, 3), skip_special=st.booleans())
def test_joined_deltas_are_the_decoded_whole_for_sentencepiece(
    ids: list[int], skip_special: bool
) -> None:
    """Byte fallback, and the spaces put before a text, too."""
    whole = SPM.decode(ids, skip_special_tokens=skip_special)
    assert "".join(deltas(SPM, ids, skip_special=skip_special)) == whole


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), data=st.data())
def test_a_character_is_never_split(text: str, data: st.DataObject) -> None:
    """C59: however the bytes of a valid text are cut into tokens, no delta has U+FFFD."""
    raw = text.replace("\ufffd", "").encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=12)) | {0, len(raw)})
    pieces = [raw[a:b] for a, b in itertools.pairwise(cuts) if a < b]
    tokenizer, ids = scripted(*pieces)
    assert not any("\ufffd" in delta for delta in deltas(tokenizer, ids))
    assert "".join(deltas(tokenizer, ids)).encode() == raw


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((b"\xf0", b"\x9f", b"\xab", b"\xa0"), ["", "", "", "🫠", ""]),
        ((b"\xc3", b"\xa9"), ["", "é", ""]),
        ((b"x\xf0", b"\x9f\xab", b"\xa0y"), ["", "", "x🫠y", ""]),
        ((b"\xf0\x9f",), ["", "\ufffd"]),
        ((b"\xf0", b"x"), ["", "\ufffdx", ""]),
        ((b"\xff", b"x"), ["\ufffd", "x", ""]),
    ],
)
def test_characters_come_whole_and_broken_ones_at_once(
    pieces: tuple[bytes, ...], expected: list[str]
) -> None:
    """C59: and the end shows what is left as U+FFFD."""
    tokenizer, ids = scripted(*pieces)
    assert deltas(tokenizer, ids) == expected


@pytest.mark.parametrize("piece", [b"\xf0", b"\xa9\xc3", b"\x80"])
def test_nothing_is_held_for_ever(piece: bytes) -> None:
    """C59: neither a run of broken characters, nor tokens that each end inside the next one."""
    tokenizer, (start, token_id) = scripted(b"\xc3", piece)
    parts = deltas(tokenizer, [start, *[token_id] * 50])
    silent = max(len(gap) for gap in "".join("x" if p else "." for p in parts).split("x"))
    assert silent <= MAX_RUN < 20
    assert "".join(parts) == tokenizer.decode([start, *[token_id] * 50])


def test_a_broken_character_belongs_to_the_tokens_that_hold_it() -> None:
    """C58: the token that proves it broken is a run of its own."""
    tokenizer, (broken, good) = scripted(b"\xf0", b"x")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(broken) == []
    assert detokenizer.push(broken) == [Run((b"\xf0",), "\ufffd")]
    assert detokenizer.push(good) == [Run((b"\xf0",), "\ufffd"), Run((b"x",), "x")]


def test_cost_per_token_does_not_grow() -> None:
    """C107: the last 1,000 of 20,000 tokens take no more steps, and hold no more, than others."""
    ids = [FIRST_BYTE + byte for byte in "hello 🫠 é".encode()] * 1250
    detokenizer = Detokenizer(BYTE_LEVEL)

    def feed(part: list[int]) -> None:
        for token_id in part:
            assert all(len(run.text) <= 4 for run in detokenizer.push(token_id))

    feed(ids[:1000])
    early = count_steps(lambda: feed(ids[1000:2000]))
    assert memory_kept(lambda: feed(ids[2000:-1000])) < 10_000
    assert count_steps(lambda: feed(ids[-1000:])) <= 1.1 * early
