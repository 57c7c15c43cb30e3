"""Limits of what may wait, deadlines, and what is said when nothing moves."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from beds.engine_bed import EngineBed, tokens, with_async_engine
from octavo.config import SchedulerConfig
from octavo.core.dump import dump
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.queue_limits import QueueLimits
from octavo.errors import ConfigError, QueueFull, RequestError
from octavo.request import Request
from octavo.sampling_params import SamplingParams


def requests(first: int, n: int, num_tokens: int = 10) -> list[Request]:
    params = SamplingParams()
    return [Request(first + i, [1] * num_tokens, params, max_tokens=2) for i in range(n)]


def test_the_queue_counts_answers_and_prompt_tokens() -> None:
    """C97: n = 3 counts as 3; all or none; who started or ended makes room."""
    queue = QueueLimits(SchedulerConfig(max_num_queued_reqs=4, max_num_queued_tokens=50))
    queue.enter(requests(0, 3))
    with pytest.raises(QueueFull, match=r"3 requests wait, the limit is 4"):
        queue.enter(requests(3, 2))
    queue.enter(requests(5, 1))
    queue.leave(0)
    with pytest.raises(QueueFull, match=r"30 prompt tokens wait, the limit is 50.* has 21"):
        queue.enter(requests(6, 1, num_tokens=21))
    queue.enter(requests(7, 1, num_tokens=20))
    for request_id in (1, 2, 5, 7, 7, 99):
        queue.leave(request_id)
    queue.enter(requests(10, 9, num_tokens=100))
    with pytest.raises(QueueFull):
        queue.enter(requests(30, 1))


def test_no_limit_is_a_choice() -> None:
    queue = QueueLimits(SchedulerConfig(max_num_queued_reqs=0, max_num_queued_tokens=0))
    for i in range(100):
        queue.enter(requests(1000 * i, 1000))
    defaults = SchedulerConfig()
    assert defaults.max_num_queued_reqs > 0, "on by default"
    assert defaults.max_num_queued_tokens > 0


def test_overflow_is_turned_away_at_once_and_what_was_accepted_ends() -> None:
    """C97: 50 requests at once, 4 may wait: most are refused, the others answer in full."""
    config = {"max_num_seqs": 1, "max_num_queued_reqs": 4}
    bed = EngineBed(scheduling=config)
    hold = threading.Event()
    compute = bed.model.submit

    def slow(plan):  # type: ignore[no-untyped-def]
        hold.wait(10)
        return compute(plan)

    bed.model.submit = slow  # type: ignore[method-assign]

    async def body(engine: AsyncLLM) -> tuple[int, list[list[int]]]:
        streams, num_refused = [], 0
        for _ in range(50):
            try:
                streams.append(engine.submit([5, 6], SamplingParams(max_tokens=3)))
            except QueueFull:
                num_refused += 1
        hold.set()
        answers = [tokens([event async for event in stream]) for stream in streams]
        with pytest.raises(RequestError):
            engine.submit([], SamplingParams(max_tokens=3))
        late = engine.submit([5, 6], SamplingParams(max_tokens=3))
        answers.append(tokens([event async for event in late]))
        return num_refused, answers

    num_refused, answers = with_async_engine(bed, body)
    assert 50 - 6 <= num_refused <= 50 - 4
    assert {len(answer) for answer in answers} == {3}


def test_an_aborted_request_leaves_the_queue() -> None:
    """C97: its place is free for the next one."""
    bed = EngineBed(scheduling={"max_num_seqs": 1, "max_num_queued_reqs": 2})

    async def body(engine: AsyncLLM) -> None:
        for _ in range(20):
            stream = engine.submit([5, 6], SamplingParams(max_tokens=50))
            stream.abort()
            await asyncio.sleep(0.01)
            assert [event.finish_reason async for event in stream][-1] == "abort"

    with_async_engine(bed, body)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_an_answer_ends_at_its_deadline_with_what_it_has() -> None:
    """Its finish_reason is timeout, its blocks are free, and neighbours do not notice."""
    clock = Clock()
    bed = EngineBed(now=clock)
    slow = bed.add([5, 6, 7], max_tokens=100, timeout=2.5)
    other = bed.add([8, 9], max_tokens=12)
    events = {slow: [], other: []}  # type: ignore[var-annotated]
    while bed.core.has_unfinished():
        for event in bed.core.step():
            events[event.request_id].append(event)
        clock.time += 0.5
    assert events[slow][-1].finish_reason == "timeout"
    assert len(tokens(events[slow])) == 5
    assert events[other][-1].finish_reason == "length"
    assert len(tokens(events[other])) == 12
    assert bed.metric('vllm:request_success_total{engine="0",finished_reason="timeout"') == 1
    bed.scheduler.audit()
    assert bed.scheduler.stats().num_running == 0


def test_who_waits_for_too_long_is_removed_and_who_runs_is_not() -> None:
    """C97: max_queue_seconds is about the start; preempted requests have started."""
    clock = Clock()
    config = {"max_num_seqs": 1, "max_queue_seconds": 3.0}
    bed = EngineBed(scheduling=config, now=clock)
    running, waiting = bed.add([5, 6, 7], max_tokens=20), bed.add([8, 9], max_tokens=2)
    ends = {}
    for step in range(40):
        for event in bed.core.step():
            if event.finish_reason is not None:
                ends[event.request_id] = (event.finish_reason, event.num_generated_tokens)
        if step == 5:
            bed.scheduler.preempt(running)
        clock.time += 0.5
    assert ends == {waiting: ("timeout", 0), running: ("length", 20)}
    assert len(bed.core._deadlines) <= 64


def test_a_timeout_is_a_number_of_seconds_above_0() -> None:
    for value in (0, -1, float("nan"), float("inf"), "3", True):
        with pytest.raises(RequestError, match="timeout is"):
            SamplingParams(timeout=value)  # type: ignore[arg-type]
    for value in (0, -1.5, "3", True):
        with pytest.raises(ConfigError, match="max_queue_seconds"):
            SchedulerConfig(max_queue_seconds=value)  # type: ignore[arg-type]
    assert SchedulerConfig(max_queue_seconds=3).max_queue_seconds == 3


def test_a_stuck_engine_says_who_waits_and_what_for(caplog: pytest.LogCaptureFixture) -> None:
    """C2: queue, blocks and reasons are in the log, and the requests end with an error."""
    bed = EngineBed(num_blocks=8)
    stuck = bed.add([5] * 12, max_tokens=4)
    bed.scheduler.kv.pool.allocate(7)  # blocks that nobody will ever give back
    events = []
    with caplog.at_level(logging.ERROR, "octavo"):
        for _ in range(5):
            events += bed.core.step()
    assert [event.finish_reason for event in events] == ["error"]
    text = caplog.text
    assert "no progress: step 3: 0 running, 1 waiting, 1 free and 0 evictable of 8 blocks" in text
    assert f"waiting: Request({stuck}, waiting, computed 0 of 12, 0 blocks) for no_blocks" in text
    assert "no_blocks[3, 1] in step 1" in text


def test_a_dump_of_a_long_queue_is_short() -> None:
    bed = EngineBed()
    for _ in range(500):
        bed.add([5, 6], max_tokens=2)
    bed.core.step()
    assert len(dump(bed.scheduler).splitlines()) == 1 + 2 * 20


def test_the_promise_about_gaps_names_the_budget() -> None:
    """CoreBed holds it against every test of the scheduler: nobody is left out of a step."""
    config = SchedulerConfig(max_num_batched_tokens=512)
    assert "in every step" in config.token_gap
    assert "at most 512 tokens" in config.token_gap
