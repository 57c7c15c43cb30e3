"""A connection that sends a head without end takes nothing from anyone else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from beds.fake_engine import FakeEngine
from beds.live_server import LiveServer, live_server, read_all, sse_events, wait_until
from octavo.server.http_limits import MAX_HEAD_BYTES, LimitedProtocol

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine()) as live:
        yield live


def send_until_refused(connection: socket.socket, part: bytes) -> int:
    """Bytes that were taken before the server closed; at most 4 MB are sent."""
    sent = 0
    try:
        while sent < 4 << 20:
            connection.sendall(part)
            sent += len(part)
    except OSError:
        pass
    connection.close()
    return sent


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (HEAD + b"x: ", b"y" * 1000),
        (HEAD, b"x: y\r\n" * 150),
        (b"GET /", b"y" * 1000),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
            b"x: y\r\n" * 150,
        ),
    ],
    ids=["one header", "many headers", "the path", "trailers"],
)
def test_a_head_without_end_is_cut_off(server: LiveServer, start: bytes, part: bytes) -> None:
    """Far more than the limit is never taken, and the server answers others at once."""
    connection = server.connect()
    connection.sendall(start)
    assert send_until_refused(connection, part) < 4 << 20
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_head_that_is_too_large_is_told_so(server: LiveServer) -> None:
    connection = server.connect()
    connection.sendall(HEAD + b"x: ")
    for _ in range(MAX_HEAD_BYTES // 1024):
        connection.sendall(b"y" * 1024)
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"65536 bytes" in answer


def test_large_heads_within_the_limit_and_large_bodies_pass(server: LiveServer) -> None:
    """The limit is one of heads: a body of any size, in many reads, is none of its business."""
    headers = {"x-long": "y" * 60_000}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        for _ in range(3):  # on one connection: each head counts alone
            assert client.get("/health").status_code == 200
            body = {"prompt": "hi", "max_tokens": 2, "user": "x" * 500_000}
            assert client.post("/v1/completions", json=body).status_code == 200


def test_a_head_that_takes_too_long_is_cut_off(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing sent, half a head, and half a second head: all are closed; an answer goes on."""
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 0.2)
    silent, half, second = (server.connect() for _ in range(3))
    half.sendall(HEAD)
    second.sendall(HEAD + b"\r\n")
    assert b"200 OK" in second.recv(65536)
    second.sendall(HEAD)
    for connection in (silent, half, second):
        connection.settimeout(10)
        while connection.recv(65536):
            pass
        connection.close()


def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a request behind it waits with it; both are answered in the end."""
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 0.1)
    engine = FakeEngine(step_delay=0.02)
    with live_server(engine) as server:
        body = b'{"prompt": "hi", "max_tokens": 30, "ignore_eos": true}'
        connection = server.connect()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: engine.num_steps >= 3)
        connection.sendall(HEAD)
        wait_until(lambda: engine.num_live == 0)
        connection.sendall(b"connection: close\r\n\r\n")
        answers = read_all(connection)
        assert answers.count(b"HTTP/1.1 200 OK") == 2


def post(body: bytes, version: str, *, length: int | None = None) -> bytes:
    """A request for a completion as bytes, its body whole or cut short."""
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    return b"%scontent-length: %d\r\n\r\n%s" % (head.encode(), length or len(body), body)


def test_a_body_that_takes_too_long_is_cut_off(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a body and then nothing: told so, and closed; nothing runs for it."""
    monkeypatch.setattr(LimitedProtocol, "body_seconds", 0.2)
    connection = server.connect()
    connection.settimeout(10)
    connection.sendall(post(b'{"prompt": "hi"', "1.1", length=40))
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    assert httpx.get(server.url + "/load").json()["server_load"] == 0


def test_a_body_that_comes_slowly_but_comes_is_taken(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came buys time; and an answer may take longer than a body."""
    monkeypatch.setattr(LimitedProtocol, "body_seconds", 0.2)
    body = b'{"prompt": "hi", "max_tokens": 2, "user": "%s"}' % (b"x" * 5000)
    whole = post(body, "1.1")
    connection = server.connect()
    connection.settimeout(10)
    connection.sendall(whole[:3000])
    time.sleep(0.6)
    connection.sendall(whole[3000:])
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
    connection.close()


def test_a_body_behind_a_long_answer_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that answers is not read from: what waits there is not slow."""
    monkeypatch.setattr(LimitedProtocol, "body_seconds", 0.1)
    engine = FakeEngine(step_delay=0.02)
    with live_server(engine) as server:
        body = b'{"prompt": "hi", "max_tokens": 30, "ignore_eos": true}'
        connection = server.connect()
        connection.settimeout(10)
        connection.sendall(post(body, "1.1"))
        wait_until(lambda: engine.num_steps >= 3)
        second = post(b'{"prompt": "hi", "max_tokens": 1}', "1.1")
        connection.sendall(second[:-5])
        wait_until(lambda: engine.num_live == 0)
        connection.sendall(second[-5:])
        answers = b""
        while answers.count(b"HTTP/1.1 200 OK") < 2:
            part = connection.recv(65536)
            assert part, answers
            answers += part
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_clients_of_http_1_0_get_no_chunks(server: LiveServer, version: str, stream: bool) -> None:
    """A body of unknown length ends with the connection; of known length, it says so."""
    wanted: dict[str, object] = {"prompt": "hi", "max_tokens": 3, "stream": stream}
    connection = server.connect()
    connection.settimeout(10)
    connection.sendall(post(json.dumps(wanted).encode(), version))
    if version == "1.1":
        assert (b"transfer-encoding: chunked" in connection.recv(65536)) == stream
        connection.close()
        return
    head, _, text = read_all(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if stream:
        assert len(sse_events(text.decode())) == 3
        assert text.endswith(b"data: [DONE]\n\n")
    else:
        assert b"content-length: %d" % len(text) in head
        assert json.loads(text)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("request_line", [b"HEAD /health", b"GET /metrics", b"GET /nowhere"])
def test_other_answers_to_http_1_0_are_whole(server: LiveServer, request_line: bytes) -> None:
    connection = server.connect()
    connection.settimeout(10)
    connection.sendall(request_line + b" HTTP/1.0\r\n\r\n")
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert bool(body) == (not request_line.startswith(b"HEAD"))
