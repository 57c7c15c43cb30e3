"""Jump-forward: where a grammar leaves one token, it is appended and not sampled; nobody can tell.

The law: whatever the form, the limits, the stop rules and what happens to the request meanwhile,
each answer is the one that comes of sampling token by token. It takes fewer steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.engine_bed import EngineBed, tokens
from beds.schemas import TREE, all_schemas
from beds.tiny_tokenizer import EOS, FIRST_BYTE
from octavo.core.event_log import Reason
from octavo.engine.grammar import MAX_RUN, Matcher
from octavo.grammar_spec import GrammarSpec
from octavo.outputs import StreamEvent
from octavo.sampling_params import SamplingParams
from octavo.trace.record import RecordingScheduler
from octavo.trace.replay import replay

Request = dict[str, Any]
LABELS = ["yes, hello world", "yes, hello worried", "no", "hello", "hello world"]
PERSON = {
    "type": "object",
    "properties": {
        "hello world": {"type": "string", "maxLength": 5},
        "at": {"type": "object", "properties": {"x": {"enum": [10, 12]}}, "required": ["x"]},
    },
    "required": ["hello world", "at"],
    "additionalProperties": False,
}
FORMS = [
    GrammarSpec.json(PERSON),
    GrammarSpec.json(TREE),
    GrammarSpec.choice(LABELS),
    GrammarSpec.regex("hello( world){3}[ab]hello(c|world)"),
    GrammarSpec.regex("(hello world )*hell"),
    GrammarSpec.lark('start: ("hello world" A | "b hello")~2\nA: /[ab]/'),
    *(GrammarSpec.json(schema) for schema in all_schemas()[29:200:23]),
]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return {
        "prompt": draw(st.lists(st.integers(FIRST_BYTE, 80), min_size=1, max_size=12)),
        "grammar": draw(st.sampled_from([*FORMS, None])),
        "n": draw(st.sampled_from([1, 1, 3])),
        "seed": draw(st.integers(0, 99)),
        "max_tokens": draw(st.sampled_from([1, 2, 5, 17, 40, 80])),
        "min_tokens": draw(st.sampled_from([0, 0, 0, 1])),
        "stop": draw(st.sampled_from([(), (), ("orl",), ("o w", ":{"), ("lo",)])),
        "include_stop_str_in_output": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (), (FIRST_BYTE + ord("w"),)])),
        "ignore_eos": draw(st.booleans()),
    }


def bed(**settings: Any) -> EngineBed:
    defaults = {"eos_token_ids": (EOS,), "num_blocks": 400, "max_model_len": 160}
    return EngineBed(**{**defaults, **settings})


def answers(
    engine: EngineBed, workload: list[Request], meanwhile: Callable[[int], None] | None = None
) -> list[tuple[Any, ...]]:
    """All that a caller may see of each answer, whatever the steps in which it came."""
    events: dict[tuple[int, int], list[StreamEvent]] = {}
    for request in workload:
        params = dict(request)
        request_id = engine.add(params.pop("prompt"), **{"max_tokens": 80, **params})
        events |= {(request_id, index): [] for index in range(params.get("n", 1))}
    for step in range(5000):
        if not engine.core.has_unfinished():
            break
        for event in engine.core.step():
            events[event.request_id, event.index].append(event)
        if meanwhile is not None:
            meanwhile(step)
    engine.run(max_steps=1)
    return [
        (
            tokens(parts),
            "".join(part.text for part in parts),
            *(parts[-1].finish_reason, parts[-1].stop_reason, parts[-1].num_generated_tokens),
        )
        for parts in events.values()
    ]


def one_by_one(workload: list[Request]) -> list[tuple[Any, ...]]:
    """The undisturbed answers without jumps."""
    return answers(bed(scheduling={"jump_forward": False}), workload)


def test_forced_tokens_take_no_step_of_their_own() -> None:
    """The form {"hello world":"...","at":{"x":1.}} has three places with a choice."""
    workload = [{"prompt": [9, 8], "grammar": FORMS[0], "seed": 3}]
    slow, fast = bed(scheduling={"jump_forward": False}), bed()
    assert answers(fast, workload) == answers(slow, workload)
    (answer,) = one_by_one(workload)
    assert json.loads(answer[1])["at"]["x"] in (10, 12)
    num_steps = [len(engine.model.traces) for engine in (slow, fast)]
    assert num_steps[0] == len(answer[0])
    assert num_steps[1] <= num_steps[0] - 20
    slow_work, fast_work = (
        sum(sum(trace.num_new_tokens.values()) for trace in engine.model.traces)
        for engine in (slow, fast)
    )
    assert slow_work == 2 + len(answer[0]) - 1
    assert slow_work - 5 < fast_work <= slow_work, "once each; the end of the last run never"


DISTURBANCES: dict[str, Request] = {
    "none": {},
    "small budget": {"scheduling": {"max_num_batched_tokens": 3}},
    "one token a step": {"scheduling": {"max_num_batched_tokens": 1}},
    "few rows": {"scheduling": {"max_num_seqs": 2}},
    "small pool": {"num_blocks": 41, "block_size": 4},
    "static, small pool": {
        "num_blocks": 41,
        "block_size": 4,
        "scheduling": {"batching_mode": "static", "max_num_batched_tokens": 9},
    },
    "swap": {
        "num_blocks": 41,
        "block_size": 4,
        "num_slots": (200, 200),
        "scheduling": {"preemption_mode": "swap"},
    },
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@given(
    workload=st.lists(requests(), min_size=1, max_size=5),
    preempted=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12),
)
@settings(max_examples=25)
def test_jumps_never_change_an_answer(
    disturbance: str, workload: list[Request], preempted: list[tuple[int, int]]
) -> None:
    """C73: ids, text, finish and stop reasons and counts, under preemption and swap at any place,
    with n answers, chunks and a prefix cache."""
    engine = bed(**DISTURBANCES[disturbance])

    def preempt(step: int) -> None:
        engine.scheduler.audit()
        for when, request_id in preempted:
            if when == step:
                engine.scheduler.preempt(request_id)

    assert answers(engine, workload, preempt) == one_by_one(workload)
    assert answers(engine, workload, preempt) == one_by_one(workload), "with cached prefixes"


def test_preempted_by_swap_anywhere_the_answer_is_the_same() -> None:
    """C73: at every step of an answer, its K/V in a tier meanwhile; and again by recomputing."""
    workload = [{"prompt": [9, 8, 7], "grammar": FORMS[0], "seed": 3}]
    whole = one_by_one(workload)
    for jumps in (False, True):
        for mode in ("swap", "recompute"):
            for at in range(len(whole[0][0])):
                engine = bed(
                    num_slots=(80, 0),
                    scheduling={"preemption_mode": mode, "jump_forward": jumps},
                )
                steps: list[int] = []

                def preempt(
                    step: int, at: int = at, engine: EngineBed = engine, seen: list[int] = steps
                ) -> None:
                    seen.extend(
                        matcher.num_tokens for matcher in engine.core.grammars.live.values()
                    )
                    if step == at:
                        engine.scheduler.preempt(0)

                assert answers(engine, workload, preempt) == whole
                assert sorted(set(steps)) == steps, "each token is taken once"
                swapped = engine.scheduler.event_log.counts[Reason.SWAPPED]
                assert bool(swapped) == (mode == "swap" and at < len(engine.model.traces) - 1)


def test_an_abort_within_a_run_frees_everything() -> None:
    engine = bed(scheduling={"max_num_batched_tokens": 2})
    request_id = engine.add([9, 8], grammar=FORMS[3], max_tokens=60)
    while not engine.core.step():
        pass
    assert engine.core.grammars.live[request_id].unsent or engine.core.step() == []
    engine.core.end(request_id, "abort")
    assert engine.run() == {}
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"min_tokens": 1},
        {"allowed_token_ids": (5,)},
        {"bad_words_token_ids": ((5,),)},
        {"logits_processors": {"typical": {"mass": 0.5}}},
    ],
)
def test_rows_whose_next_token_is_not_sure_are_sampled(params: Request) -> None:
    """What might bar the only token must fail as it does without jumps; and a log probability
    needs the logits of its position."""
    assert SamplingParams(grammar=FORMS[0]).takes_forced_tokens
    assert not SamplingParams(grammar=FORMS[0], **params).takes_forced_tokens


@given(st.integers(0, 2**32), st.sampled_from([spec for spec in FORMS if spec is not None]))
@settings(max_examples=40)
def test_a_run_is_what_the_masks_say(seed: int, spec: GrammarSpec) -> None:
    """Each token of a run stands alone in the mask of its place."""
    grammars = bed().core.grammars
    draw = np.random.default_rng(seed)
    jumping = grammars.compile(spec).twin(jumps=True)
    plain = grammars.compile(spec).twin(jumps=False)
    for _ in range(30):
        token_id = int(draw.choice(ids_of(plain.mask)))
        if token_id == EOS:
            break
        run, complete = jumping.advance([token_id])
        ended = plain.advance([token_id])
        for forced in run:
            assert ended == ([], False)
            assert ids_of(plain.mask).tolist() == [forced]
            ended = plain.advance([forced])
        assert ended == ([], complete)
        if complete:
            break
        assert jumping.mask == plain.mask
    assert jumping.num_tokens == plain.num_tokens


def ids_of(mask: bytes) -> Any:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))


def test_a_long_run_is_taken_in_parts() -> None:
    """The engine's other requests do not wait while a constant of thousands of tokens is taken."""
    spec = GrammarSpec.regex("[ab]" + "hello world" * 100)
    engine = bed(max_model_len=2000)
    workload = [{"prompt": [9], "grammar": spec, "seed": 1, "max_tokens": 1500}]
    seen: list[int] = []
    advance = Matcher.advance

    def noting(matcher: Matcher, token_ids: Any) -> Any:
        run, complete = advance(matcher, token_ids)
        seen.append(len(run))
        return run, complete

    with mock.patch.object(Matcher, "advance", noting):
        (answer,) = answers(engine, workload)
    assert (answer[1][1:], answer[2]) == ("hello world" * 100, "stop")
    assert max(seen) == MAX_RUN
    assert seen[0] < 20, "the more is forced, the fewer at a time: each look is at all of it"
    assert len(engine.model.traces) < len(answer[0])


@pytest.mark.parametrize("hashed", [False, True])
def test_a_recording_of_jumps_can_be_played_again(hashed: bool) -> None:
    lines: list[str] = []
    engine = bed(
        make_scheduler=partial(RecordingScheduler, write=lines.append, hashed=hashed),
        scheduling={"max_num_batched_tokens": 5},
        num_blocks=40,
    )
    workload = [{"prompt": [9, 8, i], "grammar": FORMS[i], "seed": i} for i in range(4)]
    assert answers(engine, workload) == one_by_one(workload)
    assert any('["extend",' in line for line in lines)
    outcome = replay(lines)
    assert (outcome.difference, outcome.num_requests) == (None, 4)
