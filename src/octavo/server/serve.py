"""`octavo serve`: a port, an engine and an HTTP server, from start to orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from ..errors import OctavoError
from .app import App, check_api_key, make_app
from .engine_protocol import Engine
from .http_limits import LimitedProtocol
from .wire import ApiKey

FLUSH_SECONDS = 1.0
"""Time for clients to read the last bytes, after the engine has ended."""

KEEP_ALIVE_SECONDS = 30
"""Idle connections of a client's pool are kept this long."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OctavoError with one line that says what to do.

    It listens at once, so that the port is ours while the model loads; clients that come
    earlier wait.
    """
    if not host.strip():
        raise OctavoError("host is empty: give 127.0.0.1, or 0.0.0.0 for every address")
    if not 0 <= port <= 65535:
        raise OctavoError(f"port {port} is no port: choose one from 1 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except socket.gaierror:
        raise OctavoError(f"host {host} is unknown: use an address of this machine") from None
    except OSError as error:
        raise OctavoError(_why_not(error, host, port)) from None


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port, or stop its program"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} needs more rights: choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: try --host 127.0.0.1 or 0.0.0.0"
    return f"can't listen on {host} port {port}: {error.strerror or error}"


class DrainingServer(uvicorn.Server):
    """Uvicorn with a gentle end.

    The first SIGTERM or SIGINT lets running answers finish, while new requests are told 503; it
    takes `shutdown_timeout` seconds at most. A second SIGINT quits at once.
    """

    def __init__(self, config: uvicorn.Config, app: App, shutdown_timeout: float) -> None:
        super().__init__(config)
        self.app = app
        self.shutdown_timeout = shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._exit = asyncio.Event()

    async def main_loop(self) -> None:
        """Uvicorn's own looks ten times a second whether to end. Here it is told so, and only the
        date header needs a clock: an idle server sleeps (C110)."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), 1.0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.app.draining:
            self.begin_drain()  # a signal came before there was a loop to tell

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Uvicorn's signal handler, in the main thread. It would end with the signal; we exit 0."""
        if self.app.draining:
            if sig == signal.SIGINT:
                os._exit(130)
            return
        self.app.draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Start to shut down; in the event loop. Returns at once."""
        self.app.draining = True
        if self._drain is None:
            if self.app.num_in_flight:
                print(
                    f"octavo: {self.app.num_in_flight} answers may finish within "
                    f"{self.shutdown_timeout:g} s; Ctrl-C quits at once",
                    file=sys.stderr,
                    flush=True,
                )
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def end_engine() -> None:
            try:
                self.app.engine.shutdown(self.shutdown_timeout)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop may be closed already
                    loop.call_soon_threadsafe(ended.set)

        # A daemon: an engine that hangs in its last step must not keep the process.
        threading.Thread(target=end_engine, name="octavo-shutdown", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), self.shutdown_timeout + FLUSH_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._answers_sent(), FLUSH_SECONDS)
        self.should_exit = True
        self._exit.set()

    async def _answers_sent(self) -> None:
        while self.app.num_in_flight:
            await asyncio.sleep(0.02)


def make_server(app: App, *, shutdown_timeout: float = 30.0) -> DrainingServer:
    """An HTTP server for the app; `run(sockets=[...])` serves until it is told to end."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    return DrainingServer(config, app, shutdown_timeout)


def serve(
    load_engine: Callable[[], Engine],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: ApiKey = None,
    served_model_names: Sequence[str] = (),
    shutdown_timeout: float = 30.0,
) -> int:
    """Take the port, load the engine, serve until a signal. Returns the exit code.

    The port comes first: when it is busy, nobody should wait for a model to hear of it. Errors
    that a user can cause are one line on stderr, and exit code 1. Port 0 takes a free one.
    """
    _configure_logging()
    try:
        check_api_key(api_key)
        listener = bind(host, port)
    except OctavoError as error:
        return _fail(error)
    with listener:
        try:
            engine = load_engine()
            app = make_app(engine, api_key=api_key, served_model_names=served_model_names)
        except OctavoError as error:
            return _fail(error)
        except KeyboardInterrupt:
            return 130
        server = make_server(app, shutdown_timeout=shutdown_timeout)
        names = ", ".join(app.served_model_names)
        print(f"Octavo serves {names} at {_url(host, listener)} (Ctrl-C ends it)", flush=True)
        server.run(sockets=[listener])
    return 0


def _configure_logging() -> None:
    """Our own notes and everyone's warnings, on stderr; what a caller has set up stays."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if logging.getLogger("octavo").level == logging.NOTSET:
        logging.getLogger("octavo").setLevel(logging.INFO)


def _fail(error: OctavoError) -> int:
    print(f"octavo: {error}", file=sys.stderr, flush=True)
    return 1


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"http://{shown}:{port}"
