"""The ASGI application: routes, keys and errors around an engine.

With a key set, every path asks for it, also those that do not exist, and for every method, HEAD and
OPTIONS included; open are only /health and the chat page, which is static. HEAD is taken wherever
GET is. No cross-origin headers are sent. A trailing slash makes no difference.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigError, RequestError
from . import utility
from .answer import Answer
from .engine_protocol import Engine
from .errors import ApiError, to_api_error, unavailable
from .protocol import GenerateRequest, parse_chat, parse_completion
from .streaming import ChatShape, CompletionShape, Response, Shape, send_plain, send_stream
from .translate import Job, build_params, chat_jobs, completion_jobs
from .wire import ClientGone, Exchange, Receive, Scope, Send

logger = logging.getLogger("octavo.server")

MAX_BODY_BYTES = 32 * 2**20

Handler = Callable[["App", Exchange], Awaitable[None]]
SomeRequest = TypeVar("SomeRequest", bound=GenerateRequest)


class Route(NamedTuple):
    """One line of the route table. A path that ends in a slash takes whatever follows it."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    is_open: bool = False
    """Served without the key."""


class App:
    """ASGI callable. `draining` is set while shutting down: no new work, /health says 503."""

    def __init__(
        self,
        engine: Engine,
        *,
        api_key: str | None = None,
        served_model_names: Sequence[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        check_api_key(api_key)
        self.engine = engine
        self.served_model_names = tuple(served_model_names) or (engine.model_name,)
        self.max_body_bytes = max_body_bytes
        self.draining = False
        self.num_in_flight = 0
        self.routes = ROUTES
        self._api_key = None if api_key is None else api_key.encode()
        build_params({}, engine.generation.sampling)  # a bad default must fail now, not per request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _other_protocol(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        try:
            exchange.adopt_request_id()
            handler = self._find_handler(exchange)
            await handler(self, exchange)
        except ClientGone:
            return
        except Exception as error:
            if exchange.started:
                raise  # too late for an answer: the HTTP server closes the connection
            await exchange.send_error(to_api_error(error, draining=self.draining))

    def _find_handler(self, exchange: Exchange) -> Handler:
        """The handler of a route, after the key is checked. Raises ApiError 401, 404, 405."""
        route = _match(exchange.path)
        if route is None or not route.is_open:
            self._check_key(exchange)
        if route is None:
            raise ApiError(404, f"No route {exchange.path[:200]!r}; see the README for the list.")
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in route.methods:
            allow = ", ".join(route.methods + (("HEAD",) if "GET" in route.methods else ()))
            raise ApiError(
                405,
                f"{route.path} takes {allow}, not {exchange.method[:32]}.",
                headers=((b"allow", allow.encode()),),
            )
        return route.handler

    def _check_key(self, exchange: Exchange) -> None:
        if self._api_key is None:
            return
        scheme, _, token = exchange.headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else b""
        given = given or exchange.headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given, self._api_key):
            raise ApiError(
                401,
                "A valid API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY.",
                headers=((b"www-authenticate", b"Bearer"),),
            )

    def check_ready(self) -> None:
        """Raises ApiError 503 while shutting down, or when the engine can't serve."""
        if self.draining:
            raise unavailable("The server is shutting down.")
        if not self.engine.is_ready:
            raise unavailable("The engine is not ready.")

    def served_name(self, model: str | None) -> str:
        """The name to answer under. Raises ApiError 404 for a model that is not served."""
        if model is None:
            return self.served_model_names[0]
        if model not in self.served_model_names:
            known = ", ".join(self.served_model_names)
            raise ApiError(404, f"The model {model[:200]!r} is not served; {known} is.")
        return model

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts a request for /load."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1


def check_api_key(api_key: str | None) -> None:
    """Raises ConfigError for an empty key: an unset variable must not open a server."""
    if api_key is not None and not api_key.strip():
        raise ConfigError("api_key", "", "not empty, or left out")


async def generate(
    app: App,
    exchange: Exchange,
    shape: Shape,
    parse: Callable[[dict[str, Any]], SomeRequest],
    make_jobs: Callable[[SomeRequest, Engine], Awaitable[list[Job]]],
) -> None:
    """Answer one request for text, streamed or plain.

    From the moment the body is read, a task listens for the client to go away, and aborts the
    answer in that very moment: its blocks are free within a step (C64).
    """
    app.check_ready()
    with app.in_flight():
        request = parse(await exchange.read_json_object(app.max_body_bytes))
        model = app.served_name(request.model)
        answer = Answer(app.engine, priority=request.priority, cache_scope=request.cache_salt)
        watcher = asyncio.create_task(_abort_when_gone(exchange.receive, answer))
        try:
            jobs = await make_jobs(request, app.engine)
            answer.submit(jobs)
            response = Response(shape, request, jobs, answer, model=model)
            send = send_stream if request.stream else send_plain
            await send(exchange, answer, response)
        finally:
            watcher.cancel()
            answer.abort()


async def _abort_when_gone(receive: Receive, answer: Answer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.abort()


async def completions(app: App, exchange: Exchange) -> None:
    """POST /v1/completions."""
    await generate(app, exchange, CompletionShape(), parse_completion, completion_jobs)


async def chat_completions(app: App, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    await generate(app, exchange, ChatShape(), parse_chat, chat_jobs)


ROUTES = (
    Route("/", ("GET",), utility.chat_page, is_open=True),
    Route("/health", ("GET",), utility.health, is_open=True),
    Route("/ping", ("GET", "POST"), utility.health),
    Route("/version", ("GET",), utility.version),
    Route("/load", ("GET",), utility.load),
    Route("/metrics", ("GET",), utility.metrics),
    Route("/v1/models", ("GET",), utility.list_models),
    Route("/v1/models/", ("GET",), utility.show_model),
    Route("/v1/completions", ("POST",), completions),
    Route("/v1/chat/completions", ("POST",), chat_completions),
    Route("/tokenize", ("POST",), utility.tokenize),
    Route("/detokenize", ("POST",), utility.detokenize),
    Route("/tokenizer_info", ("GET",), utility.tokenizer_info),
)

_EXACT = {route.path: route for route in ROUTES if route.path == "/" or route.path[-1] != "/"}
_PREFIXED = [route for route in ROUTES if route.path != "/" and route.path[-1] == "/"]


def _match(path: str) -> Route | None:
    exact = _EXACT.get(path)
    if exact is not None:
        return exact
    return next((route for route in _PREFIXED if path.startswith(route.path)), None)


async def _other_protocol(scope: Scope, receive: Receive, send: Send) -> None:
    """Lifespan needs no work here; a websocket is closed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1003})
        return
    while scope["type"] == "lifespan":
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


def make_app(
    engine: Engine,
    *,
    api_key: str | None = None,
    served_model_names: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> App:
    """The application for an engine.

    served_model_names: names that requests may use, the first is what responses show when a
    request names none; default: the engine's own. Raises ConfigError for an empty key, and for
    sampling defaults of the model that no request could use.
    """
    try:
        return App(
            engine,
            api_key=api_key,
            served_model_names=served_model_names,
            max_body_bytes=max_body_bytes,
        )
    except RequestError as error:
        raise ConfigError("the model's generation defaults", str(error), "usable") from error
