"""AsyncLLM over TapeModel: streams, aborts, crashes and shutdown of the engine thread."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any
from unittest import mock

import pytest

from beds.engine_bed import EngineBed, async_engine, tokens, with_async_engine
from beds.live_server import wait_until
from octavo.engine import async_llm
from octavo.engine.async_llm import AnswerStream, AsyncLLM
from octavo.errors import EngineDead, RequestError
from octavo.outputs import StreamEvent
from octavo.sampling_params import SamplingParams


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **values})


async def read(stream: AnswerStream) -> list[StreamEvent]:
    return [event async for event in stream]


def test_many_streams_get_their_own_answers() -> None:
    """C68: 40 streams at once, read at random speed: nothing is lost, doubled or crossed."""
    prompts = [[9 + i, 3, 5 + i] for i in range(40)]

    async def slow_read(stream: AnswerStream, pause: random.Random) -> list[StreamEvent]:
        events = []
        async for event in stream:
            events.append(event)
            await asyncio.sleep(pause.random() * 0.003)
        return events

    async def body(engine: AsyncLLM) -> list[list[StreamEvent]]:
        streams = [engine.submit(prompt, params()) for prompt in prompts]
        return await asyncio.gather(*(slow_read(s, random.Random(1)) for s in streams))

    answers = with_async_engine(EngineBed(), body)
    for prompt, events in zip(prompts, answers, strict=True):
        twin = EngineBed()
        twin.add(prompt, max_tokens=8)
        assert tokens(events) == tokens(twin.run()[0, 0])
        assert [event.finish_reason for event in events] == [None] * 7 + ["length"]


def test_n_answers_come_in_one_stream_that_ends() -> None:
    async def body(engine: AsyncLLM) -> list[StreamEvent]:
        return await read(engine.submit("abc", params(n=3)))

    events = with_async_engine(EngineBed(), body)
    assert sorted(event.index for event in events if event.finish_reason) == [0, 1, 2]


def test_bad_requests_are_refused_at_once_and_disturb_nobody() -> None:
    async def body(engine: AsyncLLM) -> int:
        good = engine.submit([5, 6, 7], params())
        for bad in ([], [10**6], "x" * 1000):
            with pytest.raises(RequestError):
                engine.submit(bad, params())
        return len(await read(good))

    assert with_async_engine(EngineBed(), body) == 8


def test_abort_ends_a_stream_and_frees_its_blocks() -> None:
    """C64, C67: one of two equal requests is aborted; the other has its whole answer."""
    bed = EngineBed(step_seconds=0.002)

    async def body(engine: AsyncLLM) -> tuple[list[StreamEvent], list[StreamEvent]]:
        left, right = (engine.submit([5, 6, 7], params(max_tokens=150)) for _ in range(2))
        first = await anext(left)
        left.abort()
        left.abort()
        rest = await read(left)
        return [first, *rest], await read(right)

    aborted, whole = with_async_engine(bed, body)
    assert aborted[-1].finish_reason == "abort"
    assert len(tokens(whole)) == 150
    assert tokens(aborted) == tokens(whole)[: len(tokens(aborted))]
    assert bed.scheduler.stats().num_running == 0
    bed.scheduler.audit()


def test_a_crash_of_the_engine_tells_everybody() -> None:
    """Promise 2: running streams end with an error, later requests are refused."""
    bed = EngineBed()

    async def body(engine: AsyncLLM) -> list[StreamEvent]:
        with mock.patch.object(bed.core, "step", side_effect=AssertionError("our own bug")):
            events = await read(engine.submit([5, 6, 7], params()))
        assert not engine.is_ready
        with pytest.raises(EngineDead, match="AssertionError"):
            engine.submit([5, 6, 7], params())
        return events

    (event,) = with_async_engine(bed, body)
    assert event.finish_reason == "error"
    assert "AssertionError" in str(event.error)


def test_a_crash_that_takes_the_scheduler_along_hangs_nobody() -> None:
    """Promise 2: the step breaks after some of its events were made, and the core can't even end
    requests any more; every index of every stream still hears of it."""
    bed = EngineBed()
    process = bed.core.outputs.process

    def break_after(events: list[Any]) -> list[StreamEvent]:
        if bed.scheduler.stats().steps >= 5:
            process(events)  # the answers that end here are gone from the processor
            raise AssertionError("our own bug")
        return process(events)

    async def body(engine: AsyncLLM) -> list[list[StreamEvent]]:
        broken = AssertionError("no end either")
        with (
            mock.patch.object(bed.core.outputs, "process", break_after),
            mock.patch.object(bed.core, "end", side_effect=broken),
        ):
            streams = [engine.submit([5 + i, 6], params(max_tokens=5, n=2)) for i in range(2)]
            streams.append(engine.submit([9, 9, 9], params(max_tokens=50)))
            return await asyncio.gather(*(asyncio.wait_for(read(s), 10) for s in streams))

    for events in with_async_engine(bed, body):
        ends = [event for event in events if event.finish_reason is not None]
        assert {event.finish_reason for event in ends} == {"error"}
        assert len(ends) == len({event.index for event in events})


def test_a_refused_request_takes_no_arrival_number() -> None:
    """Promise 1: seeds are derived from the number of arrival; one that never arrived has none."""

    def seeds(refused: int) -> list[int]:
        async def body(engine: AsyncLLM) -> list[int]:
            for _ in range(refused):
                with pytest.raises(RequestError):
                    engine.submit([5], params(max_tokens=10**6, n=3))
            streams = [engine.submit([5], params(max_tokens=1)) for _ in range(3)]
            for stream in streams:
                await read(stream)
            return [stream.seed for stream in streams]

        found: list[int] = with_async_engine(EngineBed(), body)
        return found

    assert seeds(refused=0) == seeds(refused=4)


def test_shutdown_lets_running_answers_finish() -> None:
    """C103: what runs ends normally, what comes is refused."""

    async def body(engine: AsyncLLM) -> list[StreamEvent]:
        stream = engine.submit([5, 6, 7], params(max_tokens=100))
        await anext(stream)
        stopper = threading.Thread(target=engine.shutdown)
        stopper.start()
        while engine.is_ready:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineDead, match="shutting down"):
            engine.submit([5, 6, 7], params())
        rest = await read(stream)
        stopper.join()
        return rest

    events = with_async_engine(EngineBed(), body)
    assert events[-1].finish_reason == "length"
    assert events[-1].num_generated_tokens == 100


def test_shutdown_with_a_timeout_ends_the_rest_with_an_error() -> None:
    """C103: a timeout is kept, and nobody is left without a last event."""

    async def body(engine: AsyncLLM) -> list[StreamEvent]:
        stream = engine.submit([5, 6, 7], params(max_tokens=180))
        await anext(stream)
        await asyncio.to_thread(engine.shutdown, 0.05)
        return await read(stream)

    events = with_async_engine(EngineBed(step_seconds=0.01), body)
    assert events[-1].finish_reason == "error"
    assert "shutting down" in str(events[-1].error)
    assert events[-1].num_generated_tokens < 180


def test_an_idle_engine_sleeps() -> None:
    """C110: no requests, no steps: the thread waits on its queue."""
    bed = EngineBed()
    engine = async_engine(bed)
    with mock.patch.object(bed.core, "step", wraps=bed.core.step) as step:
        time.sleep(0.1)
        assert step.call_count == 0
        engine.shutdown()


def test_an_idle_engine_recounts_its_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak is found when nothing runs, and the engine stops rather than guess."""
    monkeypatch.setattr(async_llm, "IDLE_AUDIT_SECONDS", 0.01)
    bed = EngineBed()
    engine = async_engine(bed)
    with mock.patch.object(bed.scheduler, "audit", wraps=bed.scheduler.audit) as audit:
        engine.abort([])
        wait_until(lambda: audit.call_count == 1)
        time.sleep(0.1)
        assert audit.call_count == 1
    assert engine.is_ready
    bed.scheduler.kv.pool.ref_counts[3] += 1
    engine.abort([])
    wait_until(lambda: not engine.is_ready)
    engine.shutdown()


def test_an_idle_engine_keeps_its_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once after each time that it worked: a crash of an idle server loses nothing of them."""
    monkeypatch.setattr(async_llm, "IDLE_AUDIT_SECONDS", 0.01)
    bed = EngineBed()
    saved: list[tuple[str, int]] = []
    bed.model.load_prefixes = lambda path: []  # type: ignore[attr-defined]
    bed.model.save_prefixes = lambda path, runs, go_on: saved.append((path, len(runs)))  # type: ignore[attr-defined]
    bed.core.prefixes.begin("kept", 0.0)

    async def body(engine: AsyncLLM) -> None:
        for number in (1, 2):
            async for _ in engine.submit([number, 6, 7, 8, 9], params(max_tokens=3)):
                pass
            for _ in range(500):
                await asyncio.sleep(0.01)
                if len(saved) == number:
                    break
            assert len(saved) == number
        engine.abort([])
        await asyncio.sleep(0.1)
        assert saved == [("kept", 0), ("kept", 0)], "no tier, no block; but it was asked for twice"

    with_async_engine(bed, body)
    assert len(saved) == 2, "nothing had changed since"


def test_an_idle_engine_gets_ready_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """C98: the vocabulary for the first grammar holds the interpreter while it is built; that is
    done when nobody waits."""
    monkeypatch.setattr(async_llm, "IDLE_AUDIT_SECONDS", 0.01)
    bed = EngineBed()
    engine = async_engine(bed)
    wait_until(lambda: "_vocabulary" in vars(bed.core.grammars))
    engine.shutdown()


def test_a_closed_loop_does_not_hurt_the_engine() -> None:
    """A caller whose event loop died mid-answer: its request ends, others go on."""
    bed = EngineBed()
    engine = async_engine(bed)

    async def leave() -> None:
        await anext(engine.submit([5, 6, 7], params(max_tokens=190)))

    asyncio.run(leave())

    async def stay() -> list[StreamEvent]:
        return await read(engine.submit([8, 9], params()))

    assert len(asyncio.run(stay())) == 8
    engine.shutdown(timeout=10)
    assert not bed.core.has_unfinished()


def test_what_the_limits_leave_is_what_is_accepted() -> None:
    """The front end's defaults rely on it: exactly so many tokens are taken, not one more."""

    async def body(engine: AsyncLLM) -> list[StreamEvent]:
        room = engine.max_output_tokens(3)
        with pytest.raises(RequestError):
            engine.submit([5, 6, 7], params(max_tokens=room + 1))
        return await read(engine.submit([5, 6, 7], params(max_tokens=room)))

    events = with_async_engine(EngineBed(), body)
    assert events[-1].finish_reason == "length"
