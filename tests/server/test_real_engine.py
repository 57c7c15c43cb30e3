"""The whole way of a request but arithmetic: HTTP, AsyncLLM, scheduler and text, over TapeModel.

What the fake engine of the other tests only imitates (the pool, preemption, prefix hits, faults of
one row) happens here as it does in a served model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from beds.engine_bed import EngineBed, async_engine, with_async_engine
from beds.live_server import LiveServer, read_all, sse_events, strict_json, wait_until
from octavo.engine.async_llm import AsyncLLM
from octavo.server.app import make_app

COMPLETIONS = "/v1/completions"


class Client:
    """Speaks to the app over an engine, in their own event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, body: dict[str, Any], **kwargs: Any) -> httpx.Response:
        return await self.http.post(COMPLETIONS, json=body, **kwargs)

    async def plain(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = await self.post({"prompt": prompt, "return_token_ids": True, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = strict_json(response.content)
        return answer

    async def events(self, prompt: Any, **body: Any) -> list[Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await self.post({"prompt": prompt, "return_token_ids": True, **options, **body})
        assert response.status_code == 200, response.text
        return sse_events(response.text)


def serve(bed: EngineBed, talk: Callable[[Client], Awaitable[Any]]) -> Any:
    """What `talk` says, with a client of an app around the bed's engine."""

    async def body(engine: AsyncLLM) -> Any:
        transport = httpx.ASGITransport(app=make_app(engine))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await talk(Client(http))

    answer = with_async_engine(bed, body)
    bed.scheduler.audit()
    stats = bed.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    return answer


def token_ids(events: list[Any], index: int = 0) -> list[int]:
    choices = [choice for event in events for choice in event["choices"]]
    return [x for choice in choices if choice["index"] == index for x in choice["token_ids"]]


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_what_can_never_fit_the_pool_is_a_400_with_both_numbers() -> None:
    """C1: max_model_len would allow it, the pool of 40 tokens does not; the next one runs."""

    async def talk(client: Client) -> None:
        refused = await client.post({"prompt": [5] * 60, "max_tokens": 1})
        assert refused.status_code == 400
        message = strict_json(refused.content)["error"]["message"]
        assert "61" in message
        assert "41" in message
        answer = await client.plain([5] * 4, max_tokens=3)
        assert answer["usage"]["completion_tokens"] == 3

    serve(EngineBed(num_blocks=10, block_size=4, max_model_len=100), talk)


def test_a_prompt_no_step_can_take_whole_is_a_400_with_both_numbers() -> None:
    """C1: with chunks off a prompt must fit one step's budget; a fault of 500 would say less."""
    bed = EngineBed(scheduling={"enable_chunked_prefill": False, "max_num_batched_tokens": 10})

    async def talk(client: Client) -> None:
        for stream in (False, True):
            refused = await client.post({"prompt": [5] * 11, "max_tokens": 1, "stream": stream})
            assert refused.status_code == 400
            message = strict_json(refused.content)["error"]["message"]
            assert "needs 11, the limit is 10" in message
        answer = await client.plain([5] * 10, max_tokens=2)
        assert answer["usage"]["completion_tokens"] == 2

    serve(bed, talk)


def test_cached_tokens_are_those_that_the_engine_found() -> None:
    """C65: 40 tokens, block 4: 0, then all but one (hits are counted in tokens: the last block is
    copied in part), plain, streamed, and counted once with n = 2."""
    prompt = list(range(10, 50))

    async def talk(client: Client) -> None:
        found = []
        for body in ({}, {}, {"n": 2}):
            usage = (await client.plain(prompt, max_tokens=3, **body))["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert usage["prompt_tokens"] == 40
        assert found == [0, 39, 39]
        for body in ({}, {"n": 2}):
            usage = (await client.events(prompt, max_tokens=3, **body))[-1]["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 39

    serve(EngineBed(), talk)


def test_preempted_answers_are_whole_on_the_wire() -> None:
    """C14, C65: ids, text and usage of requests that lost their blocks equal their solo answers;
    what they find again of their own is no cached token."""
    prompts = [[10 + 20 * i + j for j in range(3 + i)] for i in range(4)]

    async def alone(client: Client) -> list[list[Any]]:
        return [await client.events(prompt, max_tokens=20) for prompt in prompts]

    async def together(client: Client) -> list[list[Any]]:
        return await asyncio.gather(*(client.events(p, max_tokens=20) for p in prompts))

    expected = serve(EngineBed(), alone)
    bed = EngineBed(num_blocks=8, scheduling={"max_num_batched_tokens": 4})
    answers = serve(bed, together)
    assert bed.scheduler.stats().num_preemptions >= 2
    for answer, solo, prompt in zip(answers, expected, prompts, strict=True):
        assert token_ids(answer) == token_ids(solo)
        assert text_of(answer) == text_of(solo)
        assert answer[-1]["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 20,
            "total_tokens": len(prompt) + 20,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def test_a_failed_row_is_an_error_event_and_its_neighbours_go_on() -> None:
    """C37: row B of three fails at its fourth token; the metric says so."""
    prompts = [[10 + 20 * i + j for j in range(6)] for i in range(3)]

    async def talk(client: Client) -> list[list[Any]]:
        return await asyncio.gather(*(client.events(p, max_tokens=8) for p in prompts))

    expected = serve(EngineBed(), talk)
    bed = EngineBed(faults={1: 3})
    answers = serve(bed, talk)
    assert answers[1][-1]["error"]["message"] == "the tape tore"
    shown = token_ids(answers[1][:-1])
    assert 2 <= len(shown) <= 3, "the last token's text may still have been held back"
    assert shown == token_ids(expected[1])[: len(shown)]
    for index in (0, 2):
        assert token_ids(answers[index]) == token_ids(expected[index])
        assert answers[index][-1]["usage"] == expected[index][-1]["usage"]
    assert bed.metric("vllm:corrupted_requests_total") == 1
    assert bed.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 1


def test_a_fault_before_the_first_token_is_a_500() -> None:
    """C62, C106: no SSE; the engine answers the next one."""

    async def talk(client: Client) -> None:
        for request_id, stream in enumerate((False, True)):
            bed.model.faults[request_id] = 0
            broken = await client.post({"prompt": [5, 6], "stream": stream})
            assert broken.status_code == 500
            assert strict_json(broken.content)["error"]["message"] == "the tape tore"
        assert (await client.plain([5, 6], max_tokens=2))["usage"]["completion_tokens"] == 2

    bed = EngineBed()
    serve(bed, talk)


def test_bad_requests_beside_a_stream_leave_it_alone() -> None:
    """C38, C53: refused one after the other while the stream runs, each with its 400."""
    vocab = EngineBed().model.vocab_size
    bad: list[dict[str, Any]] = [
        {"prompt": [vocab]},
        {"prompt": []},
        {"prompt": [[1, 2], []]},
        {"prompt": [5], "logit_bias": {str(vocab): 1}},
        {"prompt": [5], "allowed_token_ids": [vocab]},
        {"prompt": [5], "stop_token_ids": [10**9]},
        {"prompt": [5], "max_tokens": 10**6},
    ]

    async def talk(client: Client) -> list[Any]:
        stream = asyncio.create_task(client.events([7, 8, 9], max_tokens=150))
        for body in bad:
            refused = await client.post(body)
            assert refused.status_code == 400, body
            assert strict_json(refused.content)["error"]["type"] == "BadRequestError"
        assert not stream.done()
        return await stream

    async def undisturbed(client: Client) -> list[Any]:
        return await client.events([7, 8, 9], max_tokens=150)

    assert token_ids(serve(EngineBed(step_seconds=0.005), talk)) == token_ids(
        serve(EngineBed(), undisturbed)
    )


@contextmanager
def live(bed: EngineBed) -> Iterator[LiveServer]:
    """Real sockets: clients can go away. The server's end shuts the engine down."""
    server = LiveServer(async_engine(bed))
    try:
        yield server
    finally:
        server.stop()


def is_idle(bed: EngineBed) -> bool:
    """Nobody waits or runs, and no block is referenced but by the cache."""
    stats = bed.scheduler.stats()
    used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    return stats.num_waiting == stats.num_running == used == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_steps", "least_cached"), [(3, 8), (14, 36)])
def test_a_client_that_goes_away_leaves_nothing_but_its_cached_prefix(
    stream: bool, num_steps: int, least_cached: int
) -> None:
    """C64: in prefill (10 chunks) and in decode, streamed or not: blocks free, counted as aborted,
    and the same prompt sent again hits what was computed."""
    bed = EngineBed(step_seconds=0.01, scheduling={"max_num_batched_tokens": 4})
    body = {"prompt": list(range(10, 50)), "max_tokens": 150, "stream": stream}
    with live(bed) as server:
        connection = server.send(body)
        wait_until(lambda: bed.scheduler.stats().steps >= num_steps)
        connection.close()
        wait_until(lambda: is_idle(bed))
        assert bed.scheduler.stats().steps < 150, "it ran to its end"
        assert bed.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
        again = httpx.post(
            server.url + COMPLETIONS, json={**body, "max_tokens": 1, "stream": False}
        )
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert least_cached <= cached <= 39
    bed.scheduler.audit()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_waiting_is_not_waited_for(stream: bool) -> None:
    """C64: it leaves the queue; the one that runs has its whole answer."""
    bed = EngineBed(step_seconds=0.01, scheduling={"max_num_seqs": 1})
    with live(bed) as server:
        first = server.send({"prompt": [5, 6, 7], "max_tokens": 150})
        wait_until(lambda: bed.scheduler.stats().num_running == 1)
        second = server.send({"prompt": [8, 9], "max_tokens": 100, "stream": stream})
        wait_until(lambda: bed.scheduler.stats().num_waiting == 1)
        second.close()
        wait_until(lambda: bed.scheduler.stats().num_waiting == 0)
        assert bed.scheduler.stats().num_running == 1
        answer = strict_json(read_all(first).partition(b"\r\n\r\n")[2])
        assert answer["usage"]["completion_tokens"] == 150
        wait_until(lambda: is_idle(bed))
        assert bed.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
    bed.scheduler.audit()


def test_equal_request_ids_are_two_requests() -> None:
    """C67: the client's id is no key of the engine either."""
    headers = {"x-request-id": "same"}

    async def talk(client: Client) -> None:
        bodies = [{"prompt": [10 * i + 5], "max_tokens": 40} for i in range(1, 5)]
        together = await asyncio.gather(*(client.post(body, headers=headers) for body in bodies))
        for body, response in zip(bodies, together, strict=True):
            alone = await client.post(body)
            texts = [strict_json(x.content)["choices"][0]["text"] for x in (response, alone)]
            assert texts[0] == texts[1]

    serve(EngineBed(), talk)
