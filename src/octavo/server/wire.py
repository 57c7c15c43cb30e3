"""What surrounds every exchange: request ids, the key, JSON in and JSON out."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

MAX_REQUEST_ID_CHARS = 256
OPEN_PATHS = frozenset({"/", "/health"})
"""Served without the key: liveness, and the chat page, which is static."""

_PRINTABLE = re.compile(r"[\x20-\x7e]*")

encode_json = msgspec.json.Encoder().encode
decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class JsonResponse(JSONResponse):
    """A whole answer, encoded by msgspec: several times as fast as the standard library."""

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def error_response(error: ApiError) -> JsonResponse:
    """The error as an answer. Closes the connection if the request's body may be left over."""
    headers = dict(error.headers or {})
    if error.status_code in (401, 413, 415):
        headers["connection"] = "close"
    return JsonResponse(error.body(), error.status_code, headers)


KEY_NUMBER = "octavo.key_number"
"""In a request's scope: which of the server's keys it brought."""

ApiKey = str | Sequence[str] | None


def keys_of(api_key: ApiKey) -> tuple[str, ...]:
    """The keys that a setting names: none, one, or several."""
    if api_key is None:
        return ()
    return (api_key,) if isinstance(api_key, str) else tuple(api_key)


class Door:
    """ASGI middleware: what comes in has an id and the key, what goes out has the id.

    The client's own id is cut to a sane length and echoed; it is never a key (C67). A trailing
    slash is dropped, rather than redirected: clients drop the body when they follow.
    """

    def __init__(self, app: ASGIApp, api_key: ApiKey) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in keys_of(api_key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"
        headers = Headers(scope=scope)
        request_id, app = headers.get("x-request-id"), self._app
        if request_id and not _PRINTABLE.fullmatch(request_id):
            text = "x-request-id may hold printable ASCII only."
            app = error_response(ApiError(400, text, param="x-request-id"))
            request_id = None
        elif not self._may_enter(scope, headers):
            text = "A valid API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY."
            app = error_response(ApiError(401, text, headers={"www-authenticate": "Bearer"}))
        echo = (request_id or uuid.uuid4().hex)[:MAX_REQUEST_ID_CHARS].encode("ascii")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", echo)]
            await send(message)

        await app(scope, receive, send_with_id)

    def _may_enter(self, scope: Scope, headers: Headers) -> bool:
        if not self._api_keys or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = given or headers.get("x-api-key", "")
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._api_keys]
        if any(matches):
            scope[KEY_NUMBER] = matches.index(True)
        return any(matches)


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError: 413, 415 or 400 with the reason.

    The header is insisted on: what a browser sends without it, or with a form's type, it sends
    for any page that asks, and so a strange page could put our processor to work.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "Send JSON, with the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Send the body uncompressed: no Content-Encoding is supported.")
    body = await _read_body(request, max_bytes)
    try:
        return decode_object(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body must be a JSON object: {error}.") from None


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Starlette's own limit is not used, since it answers in plain text."""
    too_large = ApiError(413, f"The body is larger than the limit of {max_bytes} bytes.")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)
