"""The stream is the truth: the plain answer is its fold, field by field."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.fake_engine import FakeEngine, Piece, random_script, scripted
from beds.live_server import AppClient, sse_events, strict_json
from octavo.outputs import Logprob

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT_LENGTH = {CHAT: 21, COMPLETIONS: 2}


def body_of(path: str, **extra: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "hi"}], **extra}
    return {"prompt": "hi", **extra}


def stream(client: AppClient, path: str, **extra: Any) -> list[dict[str, Any]]:
    response = client.post(path, body_of(path, stream=True, **extra))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return sse_events(response.text)


def plain(client: AppClient, path: str, **extra: Any) -> dict[str, Any]:
    response = client.post(path, body_of(path, **extra))
    assert response.status_code == 200, response.text
    return strict_json(response.content)


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices put together by a client that knows only the documents, not our code."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "ids": []})
            assert "finish_reason" not in choice, "a chunk after the end"
            choice["text"] += part["delta"]["content"] if "delta" in part else part["text"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
            choice["ids"] += part.get("token_ids", [])
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
                choice["stop_reason"] = part["stop_reason"]
    return [choices[i] for i in sorted(choices)]


def same_as_plain(choices: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(choices)))
    for mine, theirs in zip(choices, whole["choices"], strict=True):
        text = theirs["message"]["content"] if "message" in theirs else theirs["text"]
        assert mine["text"] == text
        assert mine["logprobs"] == theirs["logprobs"]
        assert mine["ids"] == theirs.get("token_ids", [])
        assert mine["finish_reason"] == theirs["finish_reason"]
        assert mine["stop_reason"] == theirs["stop_reason"]


MATRIX = [
    (path, echo, logprobs, n, ids)
    for path, echo, logprobs, n, ids in product(
        (CHAT, COMPLETIONS), (False, True), (None, 0, 2), (1, 2), (False, True)
    )
    if not (echo and path == CHAT)
]


@pytest.mark.parametrize(("path", "echo", "logprobs", "n", "ids"), MATRIX)
def test_plain_is_the_fold_of_the_stream(
    client: AppClient, path: str, echo: bool, logprobs: int | None, n: int, ids: bool
) -> None:
    """C52: every combination, field by field, usage included."""
    body: dict[str, Any] = {"seed": 3, "n": n, "max_tokens": 40, "return_token_ids": ids}
    if echo:
        body["echo"] = True
    if logprobs is not None:
        chat = {"logprobs": True, "top_logprobs": logprobs}
        body |= chat if path == CHAT else {"logprobs": logprobs}
    whole = plain(client, path, cache_salt="plain", **body)
    chunks = stream(
        client, path, cache_salt="stream", stream_options={"include_usage": True}, **body
    )
    same_as_plain(joined(chunks), whole)
    assert chunks[-1]["usage"] == whole["usage"]
    envelopes = [{k: chunk[k] for k in ("id", "created", "model", "seed")} for chunk in chunks]
    assert all(envelope == envelopes[0] for envelope in envelopes)
    assert envelopes[0]["seed"] == whole["seed"]
    kinds = {CHAT: ("chat.completion.chunk", "chat.completion")}.get(path, ("text_completion",) * 2)
    assert ({chunk["object"] for chunk in chunks}, whole["object"]) == ({kinds[0]}, kinds[1])
    if ids:
        holder = chunks[0] if path == CHAT else chunks[0]["choices"][0]
        assert len(holder["prompt_token_ids"]) == PROMPT_LENGTH[path]
    if logprobs is not None:
        assert all(choice["logprobs"] is not None for choice in whole["choices"])


@pytest.mark.parametrize("streamed", [False, True])
def test_many_prompts_keep_their_order_by_index(client: AppClient, streamed: bool) -> None:
    """Choice number p * n + i belongs to answer i of prompt p; usage counts each prompt once."""
    body = {"prompt": ["a", "bcd"], "n": 2, "max_tokens": 5, "echo": True, "ignore_eos": True}
    if streamed:
        chunks = stream(client, COMPLETIONS, stream_options={"include_usage": True}, **body)
        texts, usage = [choice["text"] for choice in joined(chunks)], chunks[-1]["usage"]
    else:
        whole = plain(client, COMPLETIONS, **body)
        texts, usage = [choice["text"] for choice in whole["choices"]], whole["usage"]
    assert [text[0] for text in texts] == ["a", "a", "b", "b"]
    assert [text.startswith("bcd") for text in texts] == [False, False, True, True]
    assert usage["prompt_tokens"] == 4
    assert usage["completion_tokens"] == 20


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_comes_in_a_chunk_of_its_own_when_asked(client: AppClient, path: str) -> None:
    """C61: null before, then one chunk without choices, then [DONE]; n counts as the sum."""
    options = {"include_usage": True}
    chunks = stream(client, path, n=2, max_tokens=9, stream_options=options, ignore_eos=True)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 18
    assert chunks[-1]["usage"]["prompt_tokens"] == PROMPT_LENGTH[path]
    assert chunks[-1]["usage"]["total_tokens"] == 18 + PROMPT_LENGTH[path]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_no_chunk_without_choices_when_usage_is_not_asked(client: AppClient, options: Any) -> None:
    """C61: clients index choices[0] of every chunk."""
    chunks = stream(client, CHAT, stream_options=options)
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


def test_continuous_usage_grows_with_every_chunk(client: AppClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 6, "ignore_eos": True, "stream_options": options}
    chunks = stream(client, COMPLETIONS, **body)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("n", [1, 2])
def test_cached_tokens_count_once_in_stream_and_plain(n: int) -> None:
    """C65: the same prompt twice; its cached part is counted once, whatever n is."""
    for path in (CHAT, COMPLETIONS):
        client = AppClient(FakeEngine())
        first = plain(client, path, n=n)["usage"]
        again = plain(client, path, n=n)["usage"]
        streamed = stream(client, path, n=n, stream_options={"include_usage": True})[-1]["usage"]
        assert first["prompt_tokens_details"] == {"cached_tokens": 0}
        expected = (PROMPT_LENGTH[path] - 1) // 4 * 4
        for usage in (again, streamed):
            assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
            assert usage["prompt_tokens"] == PROMPT_LENGTH[path]


def test_the_first_chunk_carries_role_and_first_token_together() -> None:
    """The first chunk is the time to first token: never at admission, never twice."""
    engine = FakeEngine(scripted(Piece("A", (65,)), Piece("B", (66,), finish_reason="length")))
    chunks = stream(AppClient(engine), CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": "A"}, {"content": "B"}]


def test_every_event_is_a_chunk_also_without_text() -> None:
    """A held-back character still took a step, and clients measure the steps."""
    pieces = (Piece("", ()), Piece("", ()), Piece("é", (195, 169)), Piece(finish_reason="stop"))
    chunks = stream(AppClient(FakeEngine(scripted(*pieces))), COMPLETIONS)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "", "é", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["stop"]


@pytest.mark.parametrize("stop_reason", ["BC", 7, None])
def test_what_stopped_an_answer_is_told(stop_reason: Any) -> None:
    """C56, the wire's part: the matched string or id, beside finish_reason stop."""
    pieces = (Piece("A", (65,)), Piece(" ", (32,), (), "stop", stop_reason, num_hidden=1))
    client = AppClient(FakeEngine(scripted(*pieces)))
    whole = plain(client, COMPLETIONS)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("A ", "stop")
    assert choice["stop_reason"] == stop_reason
    assert whole["usage"]["completion_tokens"] == 3  # the hidden token was generated, too
    same_as_plain(joined(stream(client, COMPLETIONS)), whole)


def test_text_goes_through_unchanged() -> None:
    """C59, the wire's part: line separators and quotes survive; one event is one line."""
    text = 'a\n\u2028\r"\\</script>\x00 é漢😀\ufffd'
    client = AppClient(FakeEngine(scripted(Piece(text, (1,)), Piece(finish_reason="stop"))))
    for path in (CHAT, COMPLETIONS):
        assert joined(stream(client, path))[0]["text"] == text


def entry(token_bytes: bytes, logprob: float, top: tuple[Logprob, ...] = ()) -> Logprob:
    text = token_bytes.decode("utf-8", "replace")
    return Logprob(token_bytes[0], text, token_bytes, logprob, top=top)


@pytest.mark.parametrize("worst", [-math.inf, math.nan, -1e30])
@pytest.mark.parametrize("streamed", [False, True])
def test_impossible_tokens_have_a_finite_floor(worst: float, streamed: bool) -> None:
    """C47: JSON has no infinity; the floor is -9999."""
    logprob = entry(b"a", worst, (entry(b"b", -0.5), entry(b"c", worst)))
    pieces = (Piece("a", (97,), (logprob,), "length"),)
    client = AppClient(FakeEngine(scripted(*pieces)))
    for path, extra in (
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"logprobs": 2}),
    ):
        if streamed:
            found = joined(stream(client, path, **extra))[0]["logprobs"]
        else:
            found = plain(client, path, **extra)["choices"][0]["logprobs"]
        if path == CHAT:
            first = found["content"][0]
            assert first["logprob"] == -9999.0
            assert [x["logprob"] for x in first["top_logprobs"]] == [-0.5, -9999.0]
        else:
            assert found["token_logprobs"] == [-9999.0]
            assert found["top_logprobs"] == [{"b": -0.5, "c": -9999.0, "a": -9999.0}]


def test_bytes_of_partial_characters_rebuild_the_text() -> None:
    """C46, C58, the wire's part: entries join to the exact text, offsets stand at characters."""
    parts = [b"x", b"\xf0\x9f", b"\xa0", b"\x81", b"y\xc3", b"\xa9"]
    entries = [entry(part, -1.0) for part in parts]
    pieces = (
        Piece("x", (1,), (entries[0],)),
        Piece("🠁", (2, 3, 4), tuple(entries[1:4])),
        Piece("yé", (5, 6), tuple(entries[4:]), "length"),
    )
    client = AppClient(FakeEngine(scripted(*pieces)))
    content = plain(client, CHAT, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(x["bytes"]) for x in content).decode() == "x🠁yé"
    found = plain(client, COMPLETIONS, logprobs=0)["choices"][0]["logprobs"]
    assert found["text_offset"] == [0, 1, 1, 1, 2, 3]
    pieces_of_bytes = [r"\xf0\x9f", r"\xa0", r"\x81", r"\x79\xc3", r"\xa9"]
    assert found["tokens"] == ["x", *(f"bytes:{piece}" for piece in pieces_of_bytes)]


def test_a_greedy_choice_can_be_told_by_comparing() -> None:
    """The sampled token's logprob has the same bits as its entry among the best (lm-eval)."""
    value = -0.1 - 1e-16
    logprob = entry(b"a", value, (entry(b"a", value), entry(b"b", -3.0)))
    client = AppClient(FakeEngine(scripted(Piece("a", (97,), (logprob,), "length"))))
    found = plain(client, COMPLETIONS, logprobs=2)["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] == max(found["top_logprobs"][0].values()) == value
    assert len(found["top_logprobs"][0]) == 2


def test_tokens_may_be_named_by_id() -> None:
    logprob = entry(b"a", -1.0, (entry(b"b", -0.5),))
    client = AppClient(FakeEngine(scripted(Piece("a", (97,), (logprob,), "length"))))
    body = {"logprobs": 1, "return_tokens_as_token_ids": True}
    found = plain(client, COMPLETIONS, **body)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97"]
    assert found["top_logprobs"] == [{"token_id:98": -0.5, "token_id:97": -1.0}]


@pytest.mark.parametrize("prompt", ["hé\n", [104, 195, 169, 10]])
@pytest.mark.parametrize("streamed", [False, True])
def test_echo_without_generation_gives_the_prompt(
    client: AppClient, prompt: Any, streamed: bool
) -> None:
    """C50: no token is generated, so no engine is needed, and no block is taken."""
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "n": 2}
    if streamed:
        chunks = stream(client, COMPLETIONS, stream_options={"include_usage": True}, **body)
        choices, usage = joined(chunks), chunks[-1]["usage"]
    else:
        whole = plain(client, COMPLETIONS, **body)
        choices, usage = whole["choices"], whole["usage"]
    assert [choice["text"] for choice in choices] == ["hé\n"] * 2
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)
    assert client.engine.submitted == []


def test_one_token_is_exactly_one(client: AppClient) -> None:
    """C50."""
    whole = plain(client, COMPLETIONS, max_tokens=1, ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == 1
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_fault_before_the_first_token_is_an_http_error(path: str, streamed: bool) -> None:
    """C62: no SSE, no 200."""
    client = AppClient(FakeEngine(scripted(Piece(error="the row's logits are not numbers"))))
    response = client.post(path, body_of(path, stream=streamed))
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    error = strict_json(response.content)["error"]
    assert error["message"] == "the row's logits are not numbers"
    assert error["code"] == 500


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_fault_inside_a_stream_is_an_event_and_then_done(path: str) -> None:
    """C62: data: {"error": ...}, then [DONE]; the other answers of the request are ended."""
    pieces = [Piece("a", (97,)), Piece("b", (98,)), Piece("c", (99,)), Piece(error="boom")]
    engine = FakeEngine(lambda p, s, index: iter(pieces if index else [Piece("z", (1,))] * 500))
    chunks = stream(AppClient(engine), path, n=2, stream_options={"include_usage": True})
    assert set(chunks[-1]) == {"error"}
    assert chunks[-1]["error"]["message"] == "boom"
    assert chunks[-1]["error"]["code"] == 500
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert engine.metrics.num_errors == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_text_that_was_held_back_comes_before_the_fault(path: str) -> None:
    """C62: what may have become a stop string is sent when a fault ends the wait for it."""
    pieces = [Piece("a", (97,)), Piece("held", (98,), error="boom")]
    chunks = stream(AppClient(FakeEngine(scripted(*pieces))), path)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    assert texts == ["a", "held"]
    assert all(choice["finish_reason"] is None for choice in choices)
    assert chunks[-1]["error"]["message"] == "boom"


def test_a_fault_in_one_of_many_prompts_ends_the_request() -> None:
    """C62: nothing is left running for nobody."""

    def script(prompt: list[int], params: Any, index: int) -> Any:
        return iter([Piece(error="boom")] if prompt == [98] else [Piece("z", (1,))] * 500)

    engine = FakeEngine(script, step_delay=0.001)
    client = AppClient(engine)
    assert client.complete(prompt=["a", "b"]).status_code == 500
    assert client.complete(prompt=["a", "b"], stream=True).text.endswith("data: [DONE]\n\n")
    engine.shutdown(5)
    assert len(engine.aborted) == 2


class BrokenTokenizerError(Exception):
    """Something that nobody expected."""


def test_an_unexpected_fault_of_ours_tells_the_client_nothing(
    client: AppClient, caplog: pytest.LogCaptureFixture
) -> None:
    """No traceback and no inner words on the wire; the log has both."""
    client.engine.submit_error = BrokenTokenizerError("secret inner words")
    response = client.complete()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "secret inner words" in caplog.text


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 60),
    n=st.integers(1, 4),
    logprobs=st.none() | st.integers(0, 5),
    min_tokens=st.integers(0, 3),
)
def test_stream_and_plain_agree_for_any_answer(
    seed: int, max_tokens: int, n: int, logprobs: int | None, min_tokens: int
) -> None:
    """C52, C61: random texts with characters of many bytes, cut anywhere."""
    client = AppClient(FakeEngine(random_script))
    body = {"seed": seed, "max_tokens": max_tokens, "n": n, "return_token_ids": True}
    body |= {"min_tokens": min(min_tokens, max_tokens)}
    body |= {} if logprobs is None else {"logprobs": logprobs}
    whole = plain(client, COMPLETIONS, cache_salt="a", **body)
    options = {"include_usage": True}
    chunks = stream(client, COMPLETIONS, cache_salt="b", stream_options=options, **body)
    same_as_plain(joined(chunks), whole)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        if logprobs is not None:
            assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
