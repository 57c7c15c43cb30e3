"""A real HTTP server on a free port, in a thread; and clients that keep to the letter of JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from beds.fake_engine import FakeEngine
from octavo.server.app import make_app
from octavo.server.serve import DrainingServer, bind, make_server


def strict_json(text: str | bytes) -> Any:
    """JSON as the standard has it: no NaN, no Infinity, no key twice."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), f"a key stands twice: {pairs}"
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


def sse_events(body: str) -> list[Any]:
    """Events of a whole SSE body, strictly read; the last must be [DONE]."""
    assert body.endswith("\n\n")
    blocks = body[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), body
    assert blocks[-1] == "data: [DONE]"
    return [strict_json(block.removeprefix("data: ")) for block in blocks[:-1]]


class AppClient:
    """Calls the app in process; each call has an event loop of its own."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.engine = engine
        self.app = make_app(engine, **settings)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return self.request("POST", path, **kwargs)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"messages": messages, **body})


class LiveServer:
    """Uvicorn around an engine, mostly a FakeEngine."""

    def __init__(self, engine: Any, shutdown_timeout: float = 5.0, **settings: Any) -> None:
        self.engine = engine
        self.app = make_app(engine, **settings)
        self.server: DrainingServer = make_server(self.app, shutdown_timeout=shutdown_timeout)
        self._listener = bind("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)

    def _run(self) -> None:
        self.server.run(sockets=[self._listener])

    def drain(self) -> None:
        """What SIGTERM does."""
        loop = self.server._loop
        assert loop is not None
        loop.call_soon_threadsafe(self.server.begin_drain)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.drain()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not end"
        self._listener.close()

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(10)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        return connection

    def send(
        self,
        body: dict[str, Any],
        path: str = "/v1/completions",
        receive_buffer: int | None = None,
    ) -> socket.socket:
        """POST over a raw socket; the answer is left unread."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        connection = self.connect(receive_buffer)
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def live_server(engine: FakeEngine, **settings: Any) -> Iterator[LiveServer]:
    server = LiveServer(engine, **settings)
    try:
        yield server
    finally:
        engine.release()
        server.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what must come to pass; the time is a limit for a hang, not a measurement."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came to pass"
        time.sleep(0.005)


def read_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    connection.close()
    return b"".join(parts)


def dechunk(raw: bytes) -> tuple[int, str]:
    """Status and body of a raw answer in chunked encoding."""
    head, _, _ = raw.partition(b"\r\n\r\n")
    at = len(head) + 4
    parts = []
    while at < len(raw):
        end = raw.index(b"\r\n", at)
        length = int(raw[at:end], 16)
        parts.append(raw[end + 2 : end + 2 + length])
        at = end + length + 4
    return int(head.split()[1]), b"".join(parts).decode()
