"""The twin law: whatever a request asks of the sampler, its answer in a crowd is its answer alone.

Every field that a request may set is drawn, all kinds in one batch, and the crowd is shuffled,
preempted at drawn steps and brought back by recomputing or by swapping. Bits must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from beds.backends import LAW_BACKENDS, backend_settings
from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.core.event_log import Reason
from octavo.grammar_spec import GrammarSpec
from octavo.outputs import RequestOutput

Workload = list[tuple[list[int], SamplingParams]]
SETTINGS: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 256, "block_size": 4}
CROWDS: dict[str, dict[str, Any]] = {
    "recompute": {"max_num_batched_tokens": 64},
    "recompute in chunks, with a cache": {
        "max_num_batched_tokens": 7,
        "enable_prefix_caching": True,
    },
    "swap": {"preemption_mode": "swap", "ram_tier_memory": 2**24, "max_num_batched_tokens": 13},
}
TOKEN_IDS = st.integers(3, VOCAB_SIZE - 1)
PLUG_INS: list[dict[str, Any]] = [
    {"dry": {"multiplier": 2.0, "allowed_length": 1}},
    {"xtc": {"probability": 0.7, "threshold": 0.05}},
    {"typical": {"p": 0.6}},
    {"dry": {}, "xtc": {}, "typical": {"p": 0.8}},
]
GRAMMARS = [
    GrammarSpec.regex("[a-d ]{2,9}"),
    GrammarSpec.choice(["yes", "no", "maybe"]),
    GrammarSpec.json({"type": "object", "properties": {"a": {"type": "boolean"}}}),
]


def often(values: st.SearchStrategy[Any], default: Any) -> st.SearchStrategy[Any]:
    """Values half of the time."""
    return st.one_of(st.just(default), values)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    scored = draw(st.sampled_from([None, None, 0, 3]))
    max_tokens = draw(st.integers(1, 14))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2])),
        seed=draw(st.integers(0, 2**63 - 1)),
        temperature=draw(st.sampled_from([0.0, 0.6, 1.0, 1.5])),
        top_k=draw(often(st.integers(1, 40), 0)),
        top_p=draw(often(st.floats(0.3, 0.99), 1.0)),
        min_p=draw(often(st.floats(0.001, 0.3), 0.0)),
        repetition_penalty=draw(often(st.floats(0.5, 2), 1.0)),
        presence_penalty=draw(often(st.floats(-2, 2), 0.0)),
        frequency_penalty=draw(often(st.floats(-2, 2), 0.0)),
        logit_bias=draw(often(st.dictionaries(TOKEN_IDS, st.floats(-9, 9), max_size=4), ())),
        allowed_token_ids=draw(st.sampled_from([None, None, tuple(range(5, VOCAB_SIZE, 2))])),
        bad_words_token_ids=draw(
            often(st.lists(st.lists(TOKEN_IDS, min_size=1, max_size=2).map(tuple), max_size=9), ())
        ),
        logits_processors=draw(often(st.sampled_from(PLUG_INS), ())),
        grammar=draw(st.sampled_from([None, None, None, *GRAMMARS])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop=draw(often(st.sampled_from([("e",), ("th", " a")]), ())),
        stop_token_ids=draw(often(st.lists(TOKEN_IDS, max_size=3), ())),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 5])),
        prompt_logprobs=scored,
        logprobs_mode="raw" if scored is not None else draw(st.sampled_from(["raw", "processed"])),
        logprob_token_ids=draw(often(st.lists(TOKEN_IDS, max_size=2), ())),
    )


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Workload, list[int], list[tuple[int, int]]]:
    """(requests, their order in the crowd, (step, place) of those that are preempted)."""
    prefix = draw(st.lists(TOKEN_IDS, max_size=12))
    prompts = st.lists(TOKEN_IDS, min_size=1, max_size=20)
    workload = [
        ((prefix if draw(st.booleans()) else []) + draw(prompts), draw(sampling_params()))
        for _ in range(draw(st.integers(2, 6)))
    ]
    order = draw(st.permutations(range(len(workload))))
    places = st.tuples(st.integers(1, 20), st.integers(0, 7))
    return workload, list(order), draw(st.lists(places, min_size=1, max_size=5))


def one_of_each() -> tuple[Workload, list[int], list[tuple[int, int]]]:
    """A request for each field that changes a row, and one without any; all are preempted."""
    common: dict[str, Any] = {"max_tokens": 10, "logprobs": 3, "ignore_eos": True}
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 9, "min_p": 0.01, "top_p": 0.9, "logprobs_mode": "processed"},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {7: 4.0, 9: -4.0}, "logprob_token_ids": [7, 9]},
        {"allowed_token_ids": range(5, 30), "stop_token_ids": [6], "min_tokens": 10},
        {"bad_words_token_ids": tuple((i,) for i in range(10, 60)), "n": 2},
        {"bad_words_token_ids": tuple((i, i) for i in range(VOCAB_SIZE)), "temperature": 0.0},
        {"prompt_logprobs": 2, "n": 2, "stop": ("q",)},
        *({"logits_processors": each} for each in PLUG_INS),
        *({"grammar": each, "logprobs_mode": "processed"} for each in GRAMMARS),
    ]
    workload: Workload = []
    for i, each in enumerate(fields):
        values = {key: tuple(x) if isinstance(x, range) else x for key, x in each.items()}
        prompt = [3 + (7 * i + 5 * j) % (VOCAB_SIZE - 3) for j in range(2 + 3 * i % 17)]
        workload.append((prompt, SamplingParams(**{**common, "seed": i, **values})))
    order = [(7 * i + 3) % len(workload) for i in range(len(workload))]
    assert sorted(order) == list(range(len(workload)))
    return workload, order, [(step, place) for step in (3, 6, 8, 11) for place in range(16)]


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """Everything that a caller may see of all answers to a prompt."""

    def rows(logprobs: Any) -> list[Any]:
        return [
            x and (x.token_id, x.logprob, x.rank, [(y.token_id, y.logprob) for y in x.top])
            for x in logprobs or ()
        ]

    answers = [
        (x.token_ids, x.text, x.finish_reason, str(x.error), rows(x.logprobs))
        for x in output.outputs
    ]
    return answers, rows(output.prompt_logprobs)


class Twins:
    """The crowds' engines and the one of the undisturbed, over one tiny model."""

    def __init__(self, model: str, backend: str) -> None:
        fixed = {**SETTINGS, **backend_settings(backend)}
        self.alone = LLM(model, **fixed, enable_prefix_caching=False)
        self.crowds = {name: LLM(model, **fixed, **each) for name, each in CROWDS.items()}

    def close(self) -> None:
        for llm in (self.alone, *self.crowds.values()):
            llm.close()


def run(llm: LLM, workload: Workload, preempted: Sequence[tuple[int, int]] = ()) -> list[Any]:
    """What each request is answered; before step s, one that runs is preempted."""
    scheduler = llm._engine.core.scheduler
    original, step = scheduler.schedule, 0

    def schedule() -> Any:
        nonlocal step
        step += 1
        for when, place in preempted:
            live = sorted(scheduler.running)
            if when == step and live:
                scheduler.preempt(live[place % len(live)])
        return original()

    scheduler.schedule = schedule  # type: ignore[method-assign]
    outputs = llm.generate([p for p, _ in workload], [p for _, p in workload], use_tqdm=False)
    scheduler.schedule = original  # type: ignore[method-assign]
    return [bits(output) for output in outputs]


@pytest.fixture(scope="module", params=LAW_BACKENDS)
def twins(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Twins]:
    folder: Path = tmp_path_factory.mktemp("twins")
    made = Twins(str(write_tiny_gguf(folder / "tiny.gguf")), request.param)
    yield made
    made.close()


@pytest.mark.parametrize("crowd", CROWDS)
@given(drawn=crowds())
@example(drawn=one_of_each())
@settings(max_examples=12)
def test_in_a_crowd_as_alone(
    twins: Twins, crowd: str, drawn: tuple[Workload, list[int], list[tuple[int, int]]]
) -> None:
    """R44, R83, R99, C29, C73: all features at once, in any order, preempted anywhere."""
    workload, order, preempted = drawn
    alone = [run(twins.alone, [request])[0] for request in workload]
    llm = twins.crowds[crowd]
    assert run(llm, [workload[i] for i in order], preempted) == [alone[i] for i in order]


@pytest.mark.parametrize("crowd", CROWDS)
def test_the_crowd_is_really_preempted(twins: Twins, crowd: str) -> None:
    """The law above says nothing where nobody is: here several are, by the means of the name."""
    workload, _, preempted = one_of_each()
    core = twins.crowds[crowd]._engine.core
    before = {reason: core.scheduler.event_log.counts[reason] for reason in Reason}
    run(twins.crowds[crowd], workload, preempted)
    counts = core.scheduler.event_log.counts
    assert counts[Reason.PREEMPTED] - before[Reason.PREEMPTED] >= 5
    if crowd == "swap":
        assert counts[Reason.SWAPPED] - before[Reason.SWAPPED] >= 5
