"""The engine's loop over TapeModel: one fault ends one request, and nothing is ever lost."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from beds.engine_bed import EngineBed, tokens
from octavo.engine.metrics import Metrics
from octavo.errors import RequestError, RequestTooLarge
from octavo.messages import SchedulerOutput

PROMPTS = [[10 + 7 * i + j for j in range(5 + 3 * i)] for i in range(4)]


def solo(prompt: list[int], **params: Any) -> list[int]:
    """What a prompt answers with the whole engine to itself."""
    bed = EngineBed()
    bed.add(prompt, **params)
    return tokens(bed.run()[0, 0])


def test_neighbours_answer_as_if_alone() -> None:
    """R44: a batch of four gives each its solo answer."""
    bed = EngineBed()
    ids = [bed.add(prompt, max_tokens=6) for prompt in PROMPTS]
    events = bed.run()
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert tokens(events[request_id, 0]) == solo(prompt, max_tokens=6)
        assert events[request_id, 0][-1].finish_reason == "length"


@pytest.mark.parametrize("where", ["model row", "text", "stop check"])
def test_a_fault_ends_its_own_request_only(where: str) -> None:
    """C106, C37: row 1 of 4 fails at its third token; the others finish undisturbed."""
    bed = EngineBed(faults={1: 2} if where == "model row" else None)
    ids = [bed.add(prompt, max_tokens=6) for prompt in PROMPTS]
    if where != "model row":
        stream = bed.core.outputs.answers[1].text
        calls = [stream.push, stream.push, mock.Mock(side_effect=ZeroDivisionError)]
        fail = mock.Mock(side_effect=lambda *args: calls.pop(0)(*args))
        vars(stream)["push"] = fail
    events = bed.run()
    last = events[1, 0][-1]
    assert last.finish_reason == "error"
    assert last.error
    for request_id in (0, 2, 3):
        assert tokens(events[ids[request_id], 0]) == solo(PROMPTS[request_id], max_tokens=6)
    assert bed.scheduler.stats().num_free_blocks + bed.scheduler.stats().num_cached_blocks == 64
    assert bed.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 1


def test_a_fault_of_the_whole_step_ends_those_in_it_and_no_other() -> None:
    """C106: the executor raises once; later requests are served."""
    bed = EngineBed()
    bed.add(PROMPTS[0], max_tokens=6)
    with mock.patch.object(bed.model, "submit", side_effect=MemoryError):
        (event,) = bed.core.step()
    assert event.finish_reason == "error"
    assert "MemoryError" in str(event.error)
    again = bed.add(PROMPTS[0], max_tokens=6)
    assert tokens(bed.run()[again, 0]) == solo(PROMPTS[0], max_tokens=6)


def test_an_interrupt_in_a_step_leaves_the_engine_whole() -> None:
    """Ctrl-C breaks into a step of LLM.generate: its requests end, no block and no row is lost."""
    bed = EngineBed(scheduling={"max_num_seqs": 2})
    ids = [bed.add(prompt, max_tokens=6) for prompt in PROMPTS[:3]]
    bed.core.step()
    with (
        mock.patch.object(bed.model, "submit", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        bed.core.step()
    bed.scheduler.audit()
    assert list(bed.core.outputs.answers) == ids[2:], "the one that waited goes on"
    again = [bed.add(prompt, max_tokens=6) for prompt in PROMPTS[:2]]
    events = bed.run()
    for request_id, prompt in zip([ids[2], *again], [PROMPTS[2], *PROMPTS[:2]], strict=True):
        assert tokens(events[request_id, 0]) == solo(prompt, max_tokens=6)


def test_twenty_random_faults_leave_the_engine_whole() -> None:
    """C106: faults of random rows at random steps, one after the other."""
    draw = random.Random(5)
    for _ in range(20):
        victim, at = draw.randrange(4), draw.randrange(6)
        bed = EngineBed(faults={victim: at}, num_blocks=24)
        for prompt in PROMPTS:
            bed.add(prompt, max_tokens=6)
        events = bed.run()
        for request_id, prompt in enumerate(PROMPTS):
            answer = tokens(events[request_id, 0])
            expected = solo(prompt, max_tokens=6)
            assert answer == (expected[:at] if request_id == victim else expected)


def test_a_stop_string_ends_the_request_in_the_scheduler_too() -> None:
    """C56: the text finds it, and the blocks are free before the next step."""
    bed = EngineBed()
    answer = solo(PROMPTS[0], max_tokens=20)
    text = bed.tokenizer.decode(answer)
    stop = text[3:5]
    bed.add(PROMPTS[0], max_tokens=20, stop=stop)
    events = bed.run()[0, 0]
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
    assert events[-1].num_generated_tokens < 20


def test_n_answers_have_their_own_index_and_end() -> None:
    """n > 1: the events of all answers carry one request id."""
    bed = EngineBed(faults={2: 1})
    request_id = bed.add(PROMPTS[1], n=3, max_tokens=5)
    events = bed.run()
    assert {key for key in events} == {(request_id, index) for index in range(3)}
    reasons = [events[request_id, index][-1].finish_reason for index in range(3)]
    assert reasons == ["length", "length", "error"]


def test_what_can_never_run_is_refused_with_both_numbers() -> None:
    """C1, C38, C53: refused at the door, and neighbours go on."""
    bed = EngineBed(num_blocks=10, max_model_len=100)
    bed.add(PROMPTS[0], max_tokens=6)
    with pytest.raises(RequestTooLarge, match=r"61.*41"):
        bed.add([5] * 60, max_tokens=1)
    with pytest.raises(RequestTooLarge, match=r"45.*41"):
        bed.add([5] * 5, max_tokens=40)
    vocab = bed.model.vocab_size
    for prompt, params in (
        ([], {}),
        ("", {}),
        ([vocab], {}),
        ([-1], {}),
        ([True], {}),
        ([1.5], {}),
        ([5], {"max_tokens": 0}),
        ([5], {"logit_bias": {vocab: 1.0}}),
        ([5], {"allowed_token_ids": [vocab]}),
        ([5], {"stop_token_ids": [10**9]}),
    ):
        with pytest.raises(RequestError):
            bed.add(prompt, **params)  # type: ignore[arg-type]
    assert tokens(bed.run()[0, 0]) == solo(PROMPTS[0], max_tokens=6)


def test_without_max_tokens_the_limits_decide() -> None:
    """R8: an answer ends at max_model_len, or where the pool ends."""
    bed = EngineBed(num_blocks=10, max_model_len=100)
    bed.add([5] * 8)
    (answer,) = bed.run().values()
    assert answer[-1].finish_reason == "length"
    assert len(tokens(answer)) == 10 * 4 + 1 - 8


def test_no_progress_is_said_and_ends_what_waits() -> None:
    """C2's watchdog: a scheduler that schedules nothing is reported, not waited for."""
    bed = EngineBed()
    bed.add(PROMPTS[0], max_tokens=3)
    empty = SchedulerOutput(1, (), (), 0)
    with mock.patch.object(bed.scheduler, "schedule", return_value=empty):
        assert bed.core.step() == bed.core.step() == []
        (event,) = bed.core.step()
    assert event.finish_reason == "error"
    assert "no progress" in str(event.error)
    assert not bed.core.has_unfinished()


def test_an_abort_frees_everything_before_the_next_step() -> None:
    """C64: ended from outside while waiting, in prefill and in decode."""
    bed = EngineBed(num_blocks=16)
    ids = [bed.add([5 + i] * 20, max_tokens=20) for i in range(3)]
    bed.core.step()
    for request_id in ids:
        event = bed.core.end(request_id, "abort")
        assert event is not None
        assert event.finish_reason == "abort"
        assert bed.core.end(request_id, "abort") is None, "the second abort finds nothing"
    stats = bed.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == 16
    bed.scheduler.audit()


def test_no_gauge_is_negative_while_the_engine_moves_blocks() -> None:
    """C67: a scrape may come between two counts of one snapshot."""
    bed = EngineBed()
    between = bed.scheduler.stats()._replace(num_free_blocks=40, num_cached_blocks=30)
    bed.metrics = Metrics("tape")
    bed.metrics.watch(lambda: between)
    assert bed.metric("vllm:kv_cache_usage_perc") == 0


def test_metrics_count_what_happened() -> None:
    """The metric names that routers read: tokens, hits, ends, times."""
    bed = EngineBed()
    bed.add(PROMPTS[3], max_tokens=4)
    bed.run()
    bed.add(PROMPTS[3], max_tokens=4)
    events = bed.run()
    prompt_tokens = len(PROMPTS[3])
    labels = '{engine="0",model_name="tape"}'
    assert bed.metric(f"vllm:prompt_tokens_total{labels}") == 2 * prompt_tokens
    assert bed.metric(f"vllm:generation_tokens_total{labels}") == 8
    hits = bed.metric(f"vllm:prefix_cache_hits_total{labels}")
    assert hits == events[1, 0][-1].num_cached_tokens == prompt_tokens - 1
    assert bed.metric(f"vllm:time_to_first_token_seconds_count{labels}") == 2
    assert bed.metric(f"vllm:inter_token_latency_seconds_count{labels}") == 6
    assert bed.metric(f"vllm:num_requests_running{labels}") == 0
    assert bed.metric(f"vllm:kv_cache_usage_perc{labels}") == 0
