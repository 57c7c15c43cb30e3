"""The served engine, from outside: a process, 32 streams at once, clients that go away."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf

NUM_STREAMS = 32
START_TIMEOUT = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`octavo serve` as a child process on a free port."""

    def __init__(self, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "octavo", "serve", *arguments]
        port = self.url.rsplit(":", 1)[1]
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                assert self.process.stdout is not None
                raise AssertionError(f"the server ended: {self.process.stdout.read()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        self.stop()
        raise AssertionError("the server did not become ready")

    def metric(self, name: str) -> float:
        """Value of one metric without labels of its own (summed over label sets)."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        lines = [x for x in text.splitlines() if x.startswith(f"{name}{{")]
        assert lines, f"{name} is not among the metrics"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 5
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline, "requests are left over"
            time.sleep(0.02)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model: Path = write_tiny_gguf(tmp_path_factory.mktemp("serve") / "tiny.gguf")
    running = Server(
        *(str(model), "--num-kv-blocks", "40", "--block-size", "8", "--max-model-len", "160"),
        *("--max-num-seqs", "12", "--max-num-batched-tokens", "48"),
    )
    yield running
    assert running.stop() == 0


def prompt_of(number: int) -> list[int]:
    return [3 + (13 * number + 7 * j) % (VOCAB_SIZE - 3) for j in range(1 + number * 3 % 50)]


async def stream(client: httpx.AsyncClient, number: int, leave_after: int | None) -> list[int]:
    """Token ids of one streamed completion; the client goes away after `leave_after` events."""
    body = {
        "prompt": prompt_of(number),
        "max_tokens": 5 + number * 7 % 60,
        "temperature": 0.7 * (number % 2),
        "seed": number,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        num_events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choice = json.loads(line[6:])["choices"][0]
            token_ids += choice.get("token_ids") or []
            num_events += 1
            if num_events == leave_after:
                return token_ids
    assert leave_after is not None or len(token_ids) == body["max_tokens"]
    return token_ids


async def all_streams(url: str, leaving: frozenset[int]) -> list[list[int]]:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return await asyncio.gather(
            *(
                stream(client, number, 2 if number in leaving else None)
                for number in range(NUM_STREAMS)
            )
        )


def test_concurrent_streams_leave_a_whole_idle_pool(server: Server) -> None:
    """C64 and the laws over the wire: 32 streams, some of which go away, in a small pool."""
    leaving = frozenset(range(0, NUM_STREAMS, 5))
    disturbed = asyncio.run(all_streams(server.url, leaving))
    server.wait_until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    again = asyncio.run(all_streams(server.url, frozenset()))
    for number in range(NUM_STREAMS):
        if number in leaving:
            assert again[number][: len(disturbed[number])] == disturbed[number]
        else:
            assert again[number] == disturbed[number]
    server.wait_until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:num_preemptions_total") > 0, "the pool was large enough"


def test_the_official_client_talks_to_the_real_engine(server: Server) -> None:
    """Plain and streamed, chat and completions: the stream joined is the plain answer."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        body: Any = {"model": model.id, "max_tokens": 12, "seed": 4, "temperature": 1.0}
        chat: Any = {**body, "messages": [{"role": "user", "content": "hi"}]}
        answer = client.chat.completions.create(**chat)
        parts = list(client.chat.completions.create(**chat, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 12
        completion = client.completions.create(**body, prompt=[5, 6, 7])
        pieces = client.completions.create(**body, prompt=[5, 6, 7], stream=True)
        assert completion.choices[0].text == "".join(piece.choices[0].text for piece in pieces)
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(**{**body, "max_tokens": 10**6}, prompt=[5])


def test_idle_server_burns_no_processor(server: Server) -> None:
    """C110: an idle server sleeps."""
    server.wait_until_idle()

    def cpu_seconds() -> float:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    before = cpu_seconds()
    time.sleep(3)
    assert cpu_seconds() - before < 0.1


def test_busy_port_is_one_clear_line(server: Server, tmp_path: Path) -> None:
    """A port in use ends the command before the model is loaded, with advice."""
    port = server.url.rsplit(":", 1)[1]
    missing = tmp_path / "never-opened.gguf"
    result = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", str(missing), "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert port in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
