"""ASGI in small: one HTTP exchange with its headers, its body and its answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from .errors import ApiError, Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_REQUEST_ID_CHARS = 256
_PRINTABLE = re.compile(rb"[\x20-\x7e]*")

encode_json = msgspec.json.Encoder().encode
decode_json = msgspec.json.Decoder().decode


class ClientGone(Exception):
    """The client closed the connection before its request was complete: nobody to answer."""


class Exchange:
    """One request and its answer. `path` is as sent, less a trailing slash."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"].rstrip("/") or "/"
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self.started = False
        self._send = send
        self.request_id = uuid.uuid4().hex

    def adopt_request_id(self) -> None:
        """Take the client's x-request-id, cut to a sane length; it is echoed, never a key (C67)."""
        value = self.headers.get(b"x-request-id")
        if not value:
            return
        if not _PRINTABLE.fullmatch(value):
            raise ApiError(400, "x-request-id may hold printable ASCII only.", param="x-request-id")
        self.request_id = value[:MAX_REQUEST_ID_CHARS].decode("ascii")

    async def read_body(self, max_bytes: int) -> bytes:
        """The whole body. Raises ApiError 413 as soon as it is known to be over `max_bytes`."""
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def read_json_object(self, max_bytes: int) -> dict[str, Any]:
        """The body as a JSON object. Raises ApiError: 413, 415 or 400 with the reason.

        The header is insisted on: what a browser sends without it, or with a form's type, it
        sends for any page that asks, and so a strange page could put our processor to work.
        """
        media_type = self.headers.get(b"content-type", b"")
        media_type = media_type.split(b";")[0].strip().lower()
        if media_type != b"application/json" and not media_type.endswith(b"+json"):
            raise ApiError(415, "Send JSON, with the header Content-Type: application/json.")
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "Send the body uncompressed: no Content-Encoding is supported.")
        body = await self.read_body(max_bytes)
        try:
            value = decode_json(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The body is not valid JSON: {error}.") from None
        except RecursionError:
            raise ApiError(400, "The body's JSON is nested too deeply.") from None
        if not isinstance(value, dict):
            raise ApiError(400, "The body must be a JSON object.")
        return value

    async def start(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        """Send status and headers."""
        self.started = True
        fields = [
            (b"content-type", content_type),
            (b"x-request-id", self.request_id.encode("ascii")),
            *headers,
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client reads slower than we write."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def send_bytes(
        self, status: int, content_type: bytes, body: bytes, headers: Headers = ()
    ) -> None:
        """A whole answer at once; a HEAD request gets the headers alone."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, content_type, (length, *headers))
        await self.write(b"" if self.method == "HEAD" else body, more=False)

    async def send_json(self, value: object, *, status: int = 200, headers: Headers = ()) -> None:
        """A whole answer in JSON."""
        await self.send_bytes(status, b"application/json", encode_json(value), headers)

    async def send_error(self, error: ApiError) -> None:
        """The error as an answer of its own. Closes the connection if a body may be left over."""
        headers = error.headers
        if error.status in (401, 413, 415):
            headers = (*headers, (b"connection", b"close"))
        await self.send_json(error.body(), status=error.status, headers=headers)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than the limit of {max_bytes} bytes.")
