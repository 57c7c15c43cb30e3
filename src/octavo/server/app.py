"""The ASGI application: routes, keys and errors around an engine.

With a key set, every path asks for it, also those that do not exist, and for every method, HEAD and
OPTIONS included; open are only /health and the chat page, which is static. HEAD is taken wherever
GET is. No cross-origin headers are sent. A trailing slash makes no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from ..errors import ConfigError, RequestError
from . import utility
from .answer import Answer
from .engine_protocol import Engine
from .errors import ApiError, to_api_error, unavailable
from .protocol import GenerateRequest, parse_chat, parse_completion
from .streaming import (
    ChatShape,
    CompletionShape,
    ResponseBuilder,
    Shape,
    plain_response,
    stream_response,
)
from .translate import Job, build_params, chat_jobs, completion_jobs
from .wire import KEY_NUMBER, ApiKey, Door, error_response, keys_of, read_json_object

MAX_BODY_BYTES = 32 * 2**20

SomeRequest = TypeVar("SomeRequest", bound=GenerateRequest)


class App:
    """The application for an engine: an ASGI callable, and the state its routes share.

    served_model_names: names that requests may use, the first is what responses show when a
    request names none; default: the engine's own. Raises ConfigError for an empty key, and for
    sampling defaults of the model that no request could use.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        api_key: ApiKey = None,
        served_model_names: Sequence[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        check_api_key(api_key)
        self.engine = engine
        self.served_model_names = tuple(served_model_names) or (engine.model_name,)
        self.max_body_bytes = max_body_bytes
        self.draining = False
        """Set while shutting down: no new work, /health says 503."""
        self.num_in_flight = 0
        self.routes = ROUTES
        # Not the class Starlette: it raises again what it has answered as a 500, and puts that
        # answer outside of all middleware, where it would lack the request's id.
        handlers = {HTTPException: answer_error, Exception: answer_error}
        router = Router(ROUTES, redirect_slashes=False)
        self._door = Door(ExceptionMiddleware(router, handlers), api_key)
        try:
            build_params({}, engine.generation.sampling)
        except RequestError as error:
            raise ConfigError("the model's generation defaults", str(error), "usable") from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._door(scope, receive, send)

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

    def tenant(self, request: GenerateRequest, scope: Scope) -> str:
        """Who shares the engine fairly: an API key, or, where that is trusted, a user."""
        if request.user and self.engine.config.scheduler.trust_user_field:
            return f"user {request.user}"
        return str(scope.get(KEY_NUMBER, ""))

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts a request for /load."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1


def check_api_key(api_key: ApiKey) -> None:
    """Raises ConfigError for an empty key: an unset variable must not open a server."""
    if not all(key.strip() for key in keys_of(api_key)):
        raise ConfigError("api_key", "", "not empty, or left out")


async def answer_error(request: Request, error: Exception) -> Response:
    """Every error of every route, as JSON; what starlette says of routes, in our words."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody is there to read it
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        route = request.scope.get("route")
        if route is None:
            path = request.scope["path"][:200]
            error = ApiError(404, f"No route {path!r}; see the README for the list.")
        else:
            allow = ", ".join(sorted(route.methods))
            text = f"{route.path} takes {allow}, not {request.method[:32]}."
            error = ApiError(405, text, headers={"allow": allow})
    return error_response(to_api_error(error, draining=request.app.draining))


@dataclass(frozen=True)
class Generation(Generic[SomeRequest]):
    """Endpoint of a route for text, streamed or plain.

    It is a plain ASGI callable, since what a function returns is sent after its end, and a
    client's going away is told only to those who ask. Here a task listens from the moment the
    body is read until the last byte is sent, also in prefill and for a plain answer, and aborts
    the answer in that very moment: its blocks are free within a step (C64).
    """

    shape: Shape
    parse: Callable[[dict[str, Any]], SomeRequest]
    make_jobs: Callable[[SomeRequest, Engine], Awaitable[list[Job]]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: App = scope["app"]
        app.check_ready()
        with app.in_flight():
            body = await read_json_object(Request(scope, receive), app.max_body_bytes)
            request = self.parse(body)
            model = app.served_name(request.model)
            answer = Answer(
                app.engine,
                priority=request.priority,
                cache_scope=request.cache_salt,
                tenant=app.tenant(request, scope),
            )
            watcher = asyncio.create_task(_abort_when_gone(receive, answer))
            try:
                jobs = await self.make_jobs(request, app.engine)
                answer.submit(jobs)
                builder = ResponseBuilder(self.shape, request, jobs, answer, model=model)
                respond = stream_response if request.stream else plain_response
                async with aclosing(answer.events()) as events:
                    response = await respond(events, answer, builder)
                    await response(scope, receive, send)
            finally:
                watcher.cancel()
                answer.abort()


async def _abort_when_gone(receive: Receive, answer: Answer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.abort()


completions = Generation(CompletionShape(), parse_completion, completion_jobs)
chat_completions = Generation(ChatShape(), parse_chat, chat_jobs)

ROUTES = [
    Route("/", utility.chat_page),
    Route("/health", utility.health),
    Route("/ping", utility.health, methods=["GET", "POST"]),
    Route("/version", utility.version),
    Route("/load", utility.load),
    Route("/metrics", utility.metrics),
    Route("/v1/models", utility.list_models),
    Route("/v1/models/{name:path}", utility.show_model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/tokenize", utility.tokenize, methods=["POST"]),
    Route("/detokenize", utility.detokenize, methods=["POST"]),
    Route("/tokenizer_info", utility.tokenizer_info),
]

make_app = App
"""What others call; that it is a class is the server's own affair."""
