"""From the port to the exit code."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from beds.live_server import dechunk, sse_events, wait_until
from octavo.errors import ModelLoadError, OctavoError
from octavo.server.serve import bind, serve

TESTS = Path(__file__).parents[1]
PROGRAM = """
    import sys
    sys.path.insert(0, {tests!r})
    from beds.fake_engine import FakeEngine
    from octavo.server.serve import serve
    sys.exit(serve(lambda: FakeEngine(step_delay={delay}), port=0, shutdown_timeout={timeout}))
"""


def never() -> Any:
    raise AssertionError("the model was loaded")


def test_a_busy_port_is_one_line_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve(never, port=port) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert str(port) in lines[0]
    assert "--port" in lines[0]


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("host.invalid", 0, "unknown"),
        ("127.0.0.1", 70000, "65535"),
        ("192.0.2.1", 0, "--host"),
        ("", 0, "host is empty"),
    ],
)
def test_an_address_that_cant_be_used_says_what_to_do(host: str, port: int, says: str) -> None:
    with pytest.raises(OctavoError, match=says):
        bind(host, port)


def test_an_empty_key_is_told_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve(never, port=0, api_key="") == 1
    assert "api_key" in capsys.readouterr().err


def test_the_port_is_ours_while_the_model_loads() -> None:
    """Two servers started at once must not both load a model."""
    with bind("127.0.0.1", 0) as first, pytest.raises(OctavoError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_model_that_cant_be_loaded_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> Any:
        raise ModelLoadError("no such file: x.gguf")

    assert serve(load, port=0) == 1
    assert capsys.readouterr().err == "octavo: no such file: x.gguf\n"


class Program:
    """A server as a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.banner = process.stdout.readline()
        self.port = int(self.banner.partition("http://127.0.0.1:")[2].split()[0])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def open_stream(self, max_tokens: int) -> socket.socket:
        connection = self.connect()
        data = b'{"prompt": "a", "stream": true, "ignore_eos": true, "max_tokens": %d}' % max_tokens
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
        connection.sendall(head + data)
        return connection


@contextmanager
def program(*, delay: float = 0.0, timeout: float = 5.0) -> Iterator[Program]:
    source = textwrap.dedent(PROGRAM).format(tests=str(TESTS), delay=delay, timeout=timeout)
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Program(process)
    finally:
        process.kill()
        process.communicate()


def rest_of(connection: socket.socket, so_far: bytes) -> bytes:
    while part := connection.recv(65536):
        so_far += part
    connection.close()
    return so_far


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish_and_exits_0(sig: signal.Signals) -> None:
    """C103: and the port is free afterwards."""
    with program(delay=0.01) as running:
        stream = running.open_stream(60)
        begun = stream.recv(65536)
        running.process.send_signal(sig)
        events = sse_events(dechunk(rest_of(stream, begun))[1])
        assert len(events) == 60
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(10) == 0
        errors = running.process.communicate()[1]
        assert "Traceback" not in errors
        bind("127.0.0.1", running.port).close()


def test_a_signal_while_idle_ends_at_once() -> None:
    """C103: also with a client that keeps its connection open."""
    with program(timeout=60) as running:
        idle = running.connect()
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in idle.recv(4096)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0
        idle.close()
        assert running.process.communicate() == ("", "")


def test_a_timeout_ends_streams_with_an_error_event() -> None:
    """C103: the process is gone soon after, and no stream is torn."""
    with program(delay=0.05, timeout=0.5) as running:
        stream = running.open_stream(500)
        begun = stream.recv(65536)
        running.process.send_signal(signal.SIGTERM)
        events = sse_events(dechunk(rest_of(stream, begun))[1])
        assert "error" in events[-1]
        assert running.process.wait(10) == 0


def test_a_second_interrupt_quits_at_once() -> None:
    with program(delay=0.05, timeout=60) as running:
        stream = running.open_stream(500)
        stream.recv(65536)
        running.process.send_signal(signal.SIGINT)
        assert running.process.stderr is not None
        assert "Ctrl-C quits at once" in running.process.stderr.readline()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(10) == 130
        stream.close()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_an_idle_server_rests() -> None:
    """C110: no polling; 2 idle seconds cost less than 4 ticks of 10 ms (a busy loop has 200)."""
    with program() as running:
        stream = running.open_stream(2)
        rest_of(stream, b"")
        before = cpu_ticks(running.process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(2)
        assert cpu_ticks(running.process.pid) - before < 4


def test_the_banner_names_model_and_address() -> None:
    with program() as running:
        assert "fake/model" in running.banner
        wait_until(lambda: running.connect().close() is None)
