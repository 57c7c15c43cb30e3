"""Laws of the text stream: stop strings never show, and text, ids and logprobs agree."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.step_count import count_steps, memory_kept
from beds.tiny_tokenizer import CONTROL, EOS, gguf_spec, scripted
from octavo.engine.stop_matcher import StopMatcher
from octavo.engine.text_stream import Piece, TextStream
from octavo.engine.tokenizer import Tokenizer
from octavo.messages import TokenLogprobs
from octavo.sampling_params import SamplingParams

TINY = Tokenizer(gguf_spec())
LETTERS = [TINY.encode(letter)[0] for letter in "ABC"]
SMILE = TINY.encode("🫠")
WORDS = [TINY.encode(word)[0] for word in ("hello", " wor", "é")]
IDS = st.lists(st.sampled_from([*LETTERS, *LETTERS, *SMILE, *WORDS, 0]), max_size=24)
STOP = st.one_of(*(st.text(letters, min_size=1, max_size=4) for letters in ("AB", "ABCoé 🫠")))
STOPS = st.lists(STOP, max_size=4).map(tuple)


def logprobs_of(ids: list[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(i), 1, ((i, -float(i)), (0, -9.0))) for i in ids)


def stream(
    tokenizer: Tokenizer,
    parts: list[list[int]],
    params: SamplingParams,
    *,
    finish_reason: str = "length",
) -> list[Piece]:
    """Push the parts one after the other, and end the answer with the last."""
    text = TextStream(tokenizer, params)
    pieces: list[Piece] = []
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        logprobs = () if params.logprobs is None else logprobs_of(part)
        pieces.append(text.push(tuple(part), logprobs, finish_reason if last else None))
        if pieces[-1].finish_reason:
            break
    return pieces


def joined(pieces: list[Piece]) -> tuple[object, ...]:
    """The whole answer that pieces add up to."""
    return (
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [entry for piece in pieces for entry in piece.logprobs],
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
    )


def cut_up(ids: list[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)) | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(cuts)] or [[]]


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition: the first stop string to be complete; of several, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(ids=IDS, stops=STOPS, data=st.data(), include=st.booleans())
def test_stop_strings_as_the_definition_says(
    ids: list[int], stops: tuple[str, ...], data: st.DataObject, include: bool
) -> None:
    """C56: whatever the tokens and the pushes, and nothing of a stop string shows before."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    pieces = stream(TINY, cut_up(ids, data), params)
    expected, stop = cut_at_stop(TINY.decode(ids), stops)
    shown = expected + stop if include and stop else expected
    text, _, _, finish_reason, stop_reason = joined(pieces)
    assert text == shown
    assert (finish_reason, stop_reason) == (("stop", stop) if stop else ("length", None))
    assert all(shown.startswith("".join(p.text for p in pieces[:n])) for n in range(len(pieces)))


@given(ids=IDS, stops=STOPS, data=st.data(), min_tokens=st.integers(0, 6))
def test_any_way_to_push_gives_the_same_answer(
    ids: list[int], stops: tuple[str, ...], data: st.DataObject, min_tokens: int
) -> None:
    """C58: text, ids, logprobs and reasons, one token or all tokens at a time."""
    params = SamplingParams(stop=stops, logprobs=1, min_tokens=min_tokens)
    at_once = stream(TINY, [ids], params)
    assert joined(stream(TINY, cut_up(ids, data), params)) == joined(at_once)
    assert joined(stream(TINY, [[i] for i in ids] or [[]], params)) == joined(at_once)


@given(ids=IDS, stops=STOPS, data=st.data())
def test_every_piece_agrees_with_itself(
    ids: list[int], stops: tuple[str, ...], data: st.DataObject
) -> None:
    """C46, C58: the text of each piece is the bytes of its entries, and of no others."""
    for piece in stream(TINY, cut_up(ids, data), SamplingParams(stop=stops, logprobs=1)):
        raw = b"".join(entry.token_bytes for entry in piece.logprobs)
        assert raw.decode("utf-8", "replace") == piece.text
        assert tuple(entry.token_id for entry in piece.logprobs) == piece.token_ids


def test_a_stop_string_across_tokens_never_shows() -> None:
    """C56, word for word."""
    tokenizer, ids = scripted(b"A", b" B", b"C D", b"E")
    for stops in (("BC",), ("C", "BC"), ("BC", "C")):
        pieces = stream(tokenizer, [[i] for i in ids], SamplingParams(stop=stops, logprobs=0))
        assert not any("B" in piece.text for piece in pieces)
        assert joined(pieces)[0] == "A "
        assert joined(pieces)[3:] == ("stop", "BC")
        assert [e.token_bytes for p in pieces for e in p.logprobs] == [b"A", b" "]
    params = SamplingParams(stop=("BC",), include_stop_str_in_output=True, logprobs=0)
    pieces = stream(tokenizer, [[i] for i in ids], params)
    assert joined(pieces)[0] == "A BC"
    assert [e.token_bytes for p in pieces for e in p.logprobs] == [b"A", b" B", b"C"]


def test_a_stop_string_that_begins_in_the_prompt_does_not_count() -> None:
    """C56: the stream sees the answer alone."""
    tokenizer, ids = scripted(b"C D", b"E")
    pieces = stream(tokenizer, [[i] for i in ids], SamplingParams(stop=("BC",)))
    assert joined(pieces)[0] == "C DE"


def test_text_flows_while_no_stop_string_is_near() -> None:
    """Only what may become a stop string waits: the rest comes with its token."""
    tokenizer, ids = scripted(b"A", b" B", b"x", b"B")
    pieces = stream(tokenizer, [[i] for i in ids], SamplingParams(stop=("BC",)))
    assert [piece.text for piece in pieces] == ["A", "", " Bx", "B"]


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    """It may begin before, but must end in a later token."""
    tokenizer, ids = scripted(b"AB", b"CAB", b"AB")
    parts = [[i] for i in ids]
    for min_tokens, expected in ((0, ""), (1, "ABC"), (2, "ABCAB"), (3, "ABCABAB")):
        params = SamplingParams(stop=("AB",), min_tokens=min_tokens)
        assert joined(stream(tokenizer, parts, params))[0] == expected


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_the_token_that_ends_an_answer_is_not_shown(stops: tuple[str, ...]) -> None:
    """An end-of-sequence or stop id is neither text nor an entry, whatever its own text is."""
    params = SamplingParams(stop=stops, logprobs=0, skip_special_tokens=False)
    for last in (EOS, LETTERS[2]):
        pieces = stream(TINY, [[LETTERS[0]], [LETTERS[1], last]], params, finish_reason="stop")
        text, ids, entries, finish_reason, _ = joined(pieces)
        assert (text, ids, finish_reason) == ("AB", LETTERS[:2], "stop")
        assert isinstance(entries, list)
        assert len(entries) == 2


def test_held_text_comes_with_the_end_and_nothing_after_it() -> None:
    """Half a stop string, half a character; an answer that has ended stays so."""
    tokenizer, ids = scripted(b"AB", b"\xf0\x9f")
    text = TextStream(tokenizer, SamplingParams(stop=("BC",)))
    assert text.push(tuple(ids)).text == ""
    assert text.push((), (), "abort") == Piece("AB\ufffd", tuple(ids), (), "abort", None)
    assert text.push((ids[0],)) == Piece("", (), (), None, None)


def test_a_stop_string_beats_the_reason_of_the_scheduler() -> None:
    """max_tokens, or a stop id, in the same push as a stop string that came first."""
    tokenizer, ids = scripted(b"A", b"BC", b"D")
    for reason in ("length", "stop"):
        piece = stream(tokenizer, [ids], SamplingParams(stop=("BC",)), finish_reason=reason)[0]
        assert piece == Piece("A", (ids[0],), (), "stop", "BC")


def test_entries_hold_exact_bytes_and_independent_alternatives() -> None:
    """C46, R68: half a character keeps its bytes; a control token that is not shown has none."""
    tokenizer, (head, tail) = scripted(b"\xf0\x9f", b"\xab\xa0")
    pieces = stream(tokenizer, [[head], [tail, 0]], SamplingParams(logprobs=2))
    first, second, control = pieces[1].logprobs
    assert [*first.token_bytes] == [240, 159]
    assert first.token_bytes + second.token_bytes == "🫠".encode()
    assert (control.token, control.token_bytes) == (CONTROL[0], b"")
    assert [(top.token_id, top.token_bytes, top.rank) for top in first.top] == [
        (head, b"\xf0\x9f", 1),
        (0, CONTROL[0].encode(), 2),
    ]
    assert first.top[0].logprob == first.logprob


def test_entries_stay_exact_where_tokens_never_end_with_a_character() -> None:
    """C58: text let go in mid-character, then cut at a stop string."""
    tokenizer, (first, middle, last) = scripted(b"\xc3", b"\xa9\xc3", b"\xa9AB")
    ids = [first, *[middle] * 20, last]
    pieces = stream(tokenizer, [[i] for i in ids], SamplingParams(stop=("AB",), logprobs=0))
    text, shown, _, _, stop = joined(pieces)
    assert (text, shown, stop) == ("é" * 21, ids, "AB")
    entries = [entry.token_bytes for piece in pieces for entry in piece.logprobs]
    assert b"".join(entries).decode() == text


def test_cost_does_not_grow_with_length_or_stop_strings() -> None:
    """C107: 20,000 tokens against 64 stop strings that nearly match all the time."""
    stops = tuple("A" * n + "Z" for n in range(1, 65))
    text = TextStream(TINY, SamplingParams(stop=stops, logprobs=0))
    part = [*LETTERS[:1] * 8, *LETTERS[1:]] * 10

    def feed(times: int) -> None:
        for _ in range(times):
            for token_id in part:
                text.push((token_id,), logprobs_of([token_id]))

    feed(10)
    early = count_steps(lambda: feed(10))
    assert memory_kept(lambda: feed(170)) < 20_000
    assert count_steps(lambda: feed(10)) <= 1.1 * early
    few = TextStream(TINY, SamplingParams(stop=stops[-1:], logprobs=0))
    text, many = few, early
    feed(10)
    assert many <= 1.5 * count_steps(lambda: feed(10))


def test_every_small_set_of_stop_strings_matches_as_defined() -> None:
    """C56: stop strings that begin, end or lie in one another, against the definition."""
    words = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product("AB", repeat=n)]
    texts = ["".join(letters) for letters in itertools.product("AB", repeat=5)]
    for stops in itertools.combinations([*words, "AABA", "BABB"], 2):
        matcher = StopMatcher(stops)
        for text in texts:
            expected, stop = cut_at_stop(text, stops)
            state, end = matcher.scan(0, text)
            found = (end - matcher.match_length[state], end) if end >= 0 else None
            assert found == ((len(expected), len(expected) + len(stop)) if stop else None)


def test_a_long_stop_string_costs_its_length_once() -> None:
    """The tree of stop strings is linear in their characters."""
    matcher = StopMatcher(("x" * 5000, "y" * 5000))
    assert len(matcher.depth) == 10001
