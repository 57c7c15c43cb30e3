"""Uvicorn's HTTP/1.1 protocol with limits: no connection may send a head without end.

The parser keeps a header until it is whole and copies it with each read, so that an endless one
would take the event loop from everybody, long before any key is asked for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers, or the trailers after a body; one read may come on top."""

HEAD_SECONDS = 30.0
"""Time from the first byte of a head (for a new connection: from its start) to the last one."""

TOO_LARGE = b"The request's headers are larger than the limit of %d bytes.\n"


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose head is too large (431) or takes too long."""

    max_head_bytes = MAX_HEAD_BYTES
    head_seconds = HEAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._num_head_bytes = 0
        """Bytes since the parser last had anything to show for them."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._num_head_bytes = 0
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_took_too_long)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

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
            text = TOO_LARGE % self.max_head_bytes
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(text), text)
            )
        self.transport.close()
