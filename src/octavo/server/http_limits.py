"""Uvicorn's HTTP/1.1 protocol with limits: no connection may send a head or a body without end.

The parser keeps a header until it is whole and copies it with each read, so that an endless one
would take the event loop from everybody, long before any key is asked for. And clients of HTTP/1.0,
which know no chunks, get none.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGISendCallable, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers, or the trailers after a body; one read may come on top."""

HEAD_SECONDS = 30.0
"""Time from the first byte of a head (for a new connection: from its start) to the last one."""

BODY_SECONDS = 30.0
"""Time that a body may take, and more for what came of it meanwhile:"""

BODY_BYTES_PER_SECOND = 1024

TOO_LARGE = b"The request's headers are larger than the limit of %d bytes.\n"


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose head is too large (431) or takes too long, or whose body does
    (408)."""

    max_head_bytes = MAX_HEAD_BYTES
    head_seconds = HEAD_SECONDS
    body_seconds = BODY_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._num_head_bytes = 0
        """Bytes since the parser last had anything to show for them."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._num_body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_body_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_timer is None:
            self._start_timer()
        self._num_head_bytes += len(data)
        counted = self._num_head_bytes
        super().data_received(data)
        if self._num_head_bytes == counted > self.max_head_bytes:
            self._refuse()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._num_head_bytes = 0
        self._stop_timer()
        self._num_body_bytes = 0
        self._body_timer = self.loop.call_later(
            self.body_seconds, self._body_took_too_long, self.loop.time()
        )
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = without_chunks(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._num_head_bytes = 0
        self._stop_body_timer()
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_took_too_long)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _body_took_too_long(self, start: float) -> None:
        """Close the connection, unless what came buys more time."""
        end = start + self.body_seconds + self._num_body_bytes / BODY_BYTES_PER_SECOND
        if self.pipeline:  # nothing is read while the answer before runs
            end = self.loop.time() + self.body_seconds
        if self.loop.time() < end:
            self._body_timer = self.loop.call_at(end, self._body_took_too_long, start)
        elif not self.transport.is_closing():
            if not self.cycle.response_started:
                self._say(b"408 Request Timeout", b"The request's body took too long to come.\n")
            self.transport.close()

    def _head_took_too_long(self) -> None:
        if self._answering():  # a request behind this one may wait as long as its answer runs
            self._start_timer()
        else:
            self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self) -> None:
        if self.transport.is_closing():
            return
        if not self._answering():
            self._say(b"431 Request Header Fields Too Large", TOO_LARGE % self.max_head_bytes)
        self.transport.close()

    def _say(self, status: bytes, text: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (status, len(text), text)
        )


def without_chunks(cycle: RequestResponseCycle) -> ASGISendCallable:
    """The `send` of an exchange whose body ends with the connection where its length is unknown."""
    send, is_framed = cycle.send, True

    async def send_unframed(message: ASGISendEvent) -> None:
        nonlocal is_framed
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_framed = b"content-length" in names
            if not is_framed:
                cycle.chunked_encoding = False
        elif not is_framed and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unframed
