"""A real server and real sockets: clients that go away, read slowly, or come in crowds."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from beds.fake_engine import FakeEngine, Piece, scripted
from beds.live_server import (
    LiveServer,
    dechunk,
    live_server,
    read_all,
    sse_events,
    strict_json,
    wait_until,
)

LONG = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine()) as live:
        yield live


@pytest.fixture
def slow_server() -> Iterator[LiveServer]:
    """500 tokens take seconds here, so that nothing ends before it is disturbed."""
    with live_server(FakeEngine(step_delay=0.02, max_num_seqs=1)) as live:
        yield live


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(slow_server: LiveServer, stream: bool) -> None:
    """C64: streamed or not, while running; the abort comes once."""
    engine = slow_server.engine
    connection = slow_server.send({**LONG, "stream": stream})
    wait_until(lambda: engine.num_steps >= 3)
    connection.close()
    wait_until(lambda: engine.num_live == 0)
    assert engine.aborted == [0]
    wait_until(lambda: slow_server.app.num_in_flight == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_waiting_ends_its_request(
    slow_server: LiveServer, stream: bool
) -> None:
    """C64: the request behind another one never runs, and the one before goes on."""
    engine = slow_server.engine
    first = slow_server.send({**LONG, "stream": True})
    wait_until(lambda: engine.num_live == 1)
    second = slow_server.send({**LONG, "stream": stream, "n": 2})
    wait_until(lambda: engine.num_live == 2)
    second.close()
    wait_until(lambda: engine.aborted == [1])
    assert engine.num_live == 1
    first.close()
    wait_until(lambda: engine.num_live == 0)


def test_a_client_that_goes_away_before_the_first_token(slow_server: LiveServer) -> None:
    """C64: in prefill there is no chunk whose sending could fail."""
    engine = slow_server.engine
    engine.hold()
    connection = slow_server.send({**LONG, "stream": True})
    wait_until(lambda: engine.num_live == 1)
    connection.close()
    wait_until(lambda: engine.aborted == [0])


def test_a_client_with_a_large_body_is_seen_to_go_away(slow_server: LiveServer) -> None:
    """C64: reading is paused while a large body comes in, and must go on afterwards."""
    engine = slow_server.engine
    connection = slow_server.send({**LONG, "user": "x" * 500_000})
    wait_until(lambda: engine.num_steps >= 3)
    connection.close()
    wait_until(lambda: engine.aborted == [0])


def test_all_prompts_of_a_request_end_with_the_client(slow_server: LiveServer) -> None:
    """C64: a batch of prompts is several requests to the engine."""
    engine = slow_server.engine
    connection = slow_server.send({**LONG, "prompt": ["a", "b", "c"], "stream": True})
    wait_until(lambda: engine.num_live == 3)
    connection.close()
    wait_until(lambda: sorted(engine.aborted) == [0, 1, 2])


def test_an_answer_that_ended_by_itself_is_not_aborted(server: LiveServer) -> None:
    for stream in (False, True):
        read_all(server.send({"prompt": "hi", "stream": stream}))
    wait_until(lambda: server.app.num_in_flight == 0)
    assert server.engine.aborted == []


def test_a_fault_in_a_stream_closes_the_connection_cleanly() -> None:
    """C62, over a socket: the last chunk of the encoding is there, after [DONE]."""
    pieces = [Piece("a", (97,)), Piece("b", (98,)), Piece("c", (99,)), Piece(error="boom")]
    with live_server(FakeEngine(scripted(*pieces))) as server:
        raw = read_all(server.send({"prompt": "hi", "stream": True}))
        assert raw.endswith(b"\r\n0\r\n\r\n")
        status, body = dechunk(raw)
        assert status == 200
        assert "\nerror:" not in body
        events = sse_events(body)
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["a", "b", "c"]
        assert events[-1]["error"]["message"] == "boom"
        assert httpx.get(server.url + "/health").status_code == 200


def test_no_text_is_lost_to_slow_readers(server: LiveServer) -> None:
    """C68: 200 random scripts, 8 streams at once, readers that stop and go."""
    url = server.url + "/v1/completions"

    def body(seed: int) -> dict[str, Any]:
        return {"prompt": "hi", "seed": seed, "max_tokens": 40, "n": 2, "logprobs": 2}

    async def read_slowly(client: httpx.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        raw = b""
        async with client.stream("POST", url, json={**body(seed), "stream": True}) as response:
            async for part in response.aiter_raw():
                raw += part
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.004)
        texts = ["", ""]
        tokens: list[list[str]] = [[], []]
        for event in sse_events(raw.decode()):
            choice = event["choices"][0]
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
        whole = strict_json((await client.post(url, json=body(seed))).content)
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert tokens == [choice["logprobs"]["tokens"] for choice in whole["choices"]]

    async def all_streams() -> None:
        gate = asyncio.Semaphore(8)
        async with httpx.AsyncClient(timeout=30) as client:

            async def one(seed: int) -> None:
                async with gate:
                    await read_slowly(client, seed)

            await asyncio.gather(*(one(seed) for seed in range(200)))

    asyncio.run(all_streams())


def test_a_reader_that_stops_altogether_disturbs_nobody(server: LiveServer) -> None:
    """C68: its events wait, the others' do not; and nothing is lost when it reads on."""
    body = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True, "n": 16, "logprobs": 20}
    stalled = server.send({**body, "stream": True}, receive_buffer=32768)
    wait_until(lambda: server.engine.num_live == 0 and len(server.engine.submitted) == 1)
    assert server.app.num_in_flight == 1  # megabytes do not fit in the socket's buffers
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code == 200
    events = sse_events(dechunk(read_all(stalled))[1])
    counts = [0] * 16
    for event in events:
        choice = event["choices"][0]
        counts[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert counts == [500] * 16


def test_equal_request_ids_do_not_mix_answers(server: LiveServer) -> None:
    """C67: two at once under one id; each has its own text, ending one leaves the other."""

    def ask(prompt: str) -> str:
        headers = {"x-request-id": "same"}
        body = {"prompt": prompt, "max_tokens": 100, "seed": 1}
        response = httpx.post(server.url + "/v1/completions", json=body, headers=headers)
        assert response.headers["x-request-id"] == "same"
        text: str = response.json()["choices"][0]["text"]
        return text

    alone = {prompt: ask(prompt) for prompt in "abcdefgh"}
    assert len(set(alone.values())) > 1
    with ThreadPoolExecutor(8) as pool:
        together = dict(zip(alone, pool.map(ask, alone), strict=True))
    assert together == alone


def test_a_full_queue_turns_away_the_overflow_alone() -> None:
    """C97: 50 at once, room for 5: the others hear 503 with Retry-After, n counts as n."""
    engine = FakeEngine(max_num_seqs=1, max_queued=4)
    engine.hold()
    with live_server(engine) as server:
        connections = [server.send({"prompt": "hi", "max_tokens": 3}) for _ in range(50)]
        wait_until(lambda: len(engine.submitted) == 5 and server.app.num_in_flight == 5)
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "hi", "n": 3})
        assert refused.status_code == 503
        engine.release()
        answers = [read_all(connection) for connection in connections]
        codes = [int(answer.split()[1]) for answer in answers]
        assert sorted(codes) == [200] * 5 + [503] * 45
        busy = [answer.lower() for answer in answers if answer.split()[1] == b"503"]
        assert all(b"\r\nretry-after: 1\r\n" in answer for answer in busy)
        retried = httpx.post(server.url + "/v1/completions", json={"prompt": "hi", "n": 3})
        assert retried.status_code == 200


def test_sixty_four_streams_at_once_keep_their_order(server: LiveServer) -> None:
    """C68: each stream is its own, however many there are."""

    def ask(seed: int, stream: bool) -> str:
        body = {"prompt": "hi", "max_tokens": 50, "seed": seed, "stream": stream}
        raw = read_all(server.send(body))
        if not stream:
            text: str = strict_json(raw.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
            return text
        return "".join(event["choices"][0]["text"] for event in sse_events(dechunk(raw)[1]))

    with ThreadPoolExecutor(64) as pool:
        streamed = list(pool.map(lambda seed: ask(seed, True), range(64)))
        whole = list(pool.map(lambda seed: ask(seed, False), range(64)))
    assert streamed == whole
    assert len({hashlib.sha256(text.encode()).digest() for text in streamed}) > 32


def test_requests_behind_one_another_on_one_connection(server: LiveServer) -> None:
    """Keep-alive and pipelining: answers come in the order of the requests."""
    one = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: %d\r\n\r\n"
    last = b"GET /nothing HTTP/1.1\r\nhost: x\r\nx-request-id: 3\r\nconnection: close\r\n\r\n"
    connection = server.connect()
    connection.sendall(one % 1 + one % 2 + last)
    raw = read_all(connection)
    ids = [line for line in raw.split(b"\r\n") if line.startswith(b"x-request-id")]
    assert ids == [b"x-request-id: 1", b"x-request-id: 2", b"x-request-id: 3"]


def test_rubbish_on_the_socket_disturbs_nobody(server: LiveServer) -> None:
    for rubbish in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"):
        connection = server.connect()
        connection.sendall(rubbish)
        connection.close()
    half = server.connect()
    half.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
    half.close()
    assert httpx.get(server.url + "/health").status_code == 200
    wait_until(lambda: server.app.num_in_flight == 0)


def test_draining_lets_answers_finish_and_takes_no_new_ones() -> None:
    """C103: readiness 503, new requests 503, two streams and one that waits finish."""
    engine = FakeEngine(max_num_seqs=2)
    engine.hold()
    with live_server(engine) as server:
        body = {**LONG, "max_tokens": 20, "stream": True}
        streams = [server.send(body) for _ in range(3)]
        wait_until(lambda: engine.num_live == 3)
        server.drain()
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 503)
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        engine.release()
        for connection in streams:
            events = sse_events(dechunk(read_all(connection))[1])
            assert len(events) == 20
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        server.stop()
        with pytest.raises(ConnectionError):
            server.connect()


def test_draining_that_takes_too_long_ends_streams_with_an_error() -> None:
    """C103: an error event and [DONE], not a torn connection; waiting ones get an HTTP error."""
    engine = FakeEngine(max_num_seqs=1, step_delay=0.02)
    with live_server(engine, shutdown_timeout=0.2) as server:
        stream = server.send({**LONG, "stream": True})
        wait_until(lambda: engine.num_steps >= 3)
        waiting = server.send(LONG)
        wait_until(lambda: engine.num_live == 2)
        server.drain()
        events = sse_events(dechunk(read_all(stream))[1])
        assert events[-1]["error"]["code"] == 503
        assert b" 503 " in read_all(waiting).split(b"\r\n")[0]
        server.stop()


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_chats(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="fake/model",
        messages=[{"role": "user", "content": "hi"}],
        seed=1,
        n=2,
        max_completion_tokens=30,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        joined = b"".join(bytes(x.bytes or ()) for x in choice.logprobs.content)
        assert joined.decode("utf-8", "replace") == choice.message.content


def test_the_official_client_streams(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model="fake/model",
            messages=[{"role": "user", "content": "hi"}],
            seed=1,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    whole = sdk.chat.completions.create(
        model="fake/model",
        messages=[{"role": "user", "content": "hi"}],
        seed=1,
        max_tokens=30,
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_official_client_completes(sdk: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "fake/model", "seed": 2, "max_tokens": 20, "logprobs": 1}
    whole = sdk.completions.create(prompt=[1, 2, 3], **body)
    parts = list(sdk.completions.create(prompt=[1, 2, 3], stream=True, **body))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None


def test_the_official_client_lists_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["fake/model"]
    assert sdk.models.retrieve("fake/model").id == "fake/model"


def test_the_official_client_understands_errors(sdk: openai.OpenAI, server: LiveServer) -> None:
    """Each status becomes the exception that its users catch."""
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="fake/model", messages=messages, temperature=-1)
    assert bad.value.param == "temperature"
    assert "temperature" in bad.value.message
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="gpt-4", messages=messages)
    server.engine.script = scripted(Piece("a", (97,)), Piece(error="boom"))
    with pytest.raises(openai.APIError, match="boom"):
        list(sdk.chat.completions.create(model="fake/model", messages=messages, stream=True))
    with pytest.raises(openai.InternalServerError):
        sdk.chat.completions.create(model="fake/model", messages=messages)


def test_the_official_client_carries_the_key() -> None:
    with (
        live_server(FakeEngine(), api_key="sk-1") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="sk-1") as good,
        openai.OpenAI(base_url=server.url + "/v1", api_key="sk-2") as bad,
    ):
        assert len(list(good.models.list())) == 1
        with pytest.raises(openai.AuthenticationError):
            bad.models.list()
