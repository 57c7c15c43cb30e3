"""Prompt logprobs through the whole engine: complete, once, and the same however they come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.grammar_spec import GrammarSpec
from octavo.outputs import RequestOutput

PROMPT = [3 + (7 * i) % (VOCAB_SIZE - 3) for i in range(33)]
SETTINGS: dict[str, Any] = {"backend": "reference", "num_kv_blocks": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    engine = LLM(model, **SETTINGS)
    yield engine
    engine.close()


def score(llm: LLM, prompt: list[int], **params: Any) -> RequestOutput:
    settings = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 2, "ignore_eos": True}
    (output,) = llm.generate([prompt], SamplingParams(**{**settings, **params}), use_tqdm=False)
    return output


def values(output: RequestOutput) -> list[Any]:
    assert output.prompt_logprobs is not None
    return [
        x and (x.token_id, x.logprob, x.rank, [(y.token_id, y.logprob) for y in x.top])
        for x in output.prompt_logprobs
    ]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_a_prompt_sent_twice_scores_the_same(model: str, length: int) -> None:
    """C43: the second finds its prefix cached, and gets all values all the same, bit for bit."""
    llm = LLM(model, block_size=16, **SETTINGS)
    first, second = (score(llm, PROMPT[:length]) for _ in range(2))
    plain = score(llm, PROMPT[:length], prompt_logprobs=None)
    llm.close()
    assert values(first) == values(second)
    assert len(values(first)) == length
    assert values(first)[0] is None
    assert None not in values(first)[1:]
    assert second.num_cached_tokens == 0
    published = length // 16 * 16
    assert plain.num_cached_tokens == min(published, length - 1), "the prefix was there to find"
    assert plain.prompt_logprobs is None


@pytest.mark.parametrize("budget", [1, 5, 16, 32])
def test_chunks_score_as_the_whole_prompt_does(llm: LLM, model: str, budget: int) -> None:
    """C44: every border between chunks, the token after it included."""
    chunked = LLM(model, max_num_batched_tokens=budget, **SETTINGS)
    assert values(score(chunked, PROMPT)) == values(score(llm, PROMPT))
    chunked.close()


def test_a_prompt_token_scores_as_the_same_token_generated(llm: LLM) -> None:
    """R67, C44: what a greedy answer says of its tokens, a prompt that holds them says too."""
    answer = score(llm, PROMPT[:9], max_tokens=8, logprobs=2).outputs[0]
    scored = score(llm, [*PROMPT[:9], *answer.token_ids])
    assert answer.logprobs is not None
    assert scored.prompt_logprobs is not None
    for own, theirs in zip(answer.logprobs, scored.prompt_logprobs[9:], strict=True):
        assert theirs is not None
        assert (own.token_id, own.logprob, own.rank) == (
            theirs.token_id,
            theirs.logprob,
            theirs.rank,
        )
        assert theirs.top[0].logprob == theirs.logprob, "greedy: the token is the best one"


@pytest.mark.parametrize("steps_before", [1, 2, 3, 4, 6])
def test_preempted_while_it_is_scored(llm: LLM, model: str, steps_before: int) -> None:
    """C43, C44: what is known is kept, what is missing is computed; nothing twice."""
    squeezed = LLM(model, max_num_batched_tokens=10, block_size=4, **SETTINGS)
    core = squeezed._engine.core
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    ran = 0
    original = core.scheduler.schedule

    def schedule() -> Any:
        nonlocal ran
        ran += 1
        if ran == steps_before + 1:
            assert core.scheduler.preempt(0)
        return original()

    core.scheduler.schedule = schedule  # type: ignore[method-assign]
    (output,) = squeezed.generate([PROMPT], params, use_tqdm=False)
    assert squeezed.stats().num_preemptions == 1
    squeezed.close()
    assert values(output) == values(score(llm, PROMPT))


@pytest.mark.parametrize(("seconds", "whole"), [(1.5, False), (2.5, False), (6.5, True)])
def test_a_prompt_whose_time_is_over_has_all_scores_or_none(
    model: str, seconds: float, whole: bool
) -> None:
    """C43: it ends as one that is not scored would, and the one beside it has all of them."""
    llm = LLM(model, max_num_batched_tokens=16, **SETTINGS)
    clock = itertools.count()
    llm._engine.core.now = lambda: float(next(clock))
    params = SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1)
    late, other = llm.generate([PROMPT] * 2, [replace(params, timeout=seconds), params])
    assert late.outputs[0].finish_reason == "timeout"
    assert (late.prompt_logprobs is not None) == whole
    assert not whole or len(values(late)) == len(PROMPT)
    assert len(values(other)) == len(PROMPT)
    llm.close()


def test_scoring_generates_nothing(llm: LLM) -> None:
    """C50: max_tokens 0 with prompt logprobs; every answer has its scores, no token, "length"."""
    (event,) = llm.stream(
        PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0, logprobs=1)
    )
    assert (event.text, event.token_ids, event.logprobs) == ("", (), ())
    assert (event.finish_reason, event.num_generated_tokens) == ("length", 0)
    assert event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == 33
    with pytest.raises(RequestError, match="nothing to generate"):
        llm.generate([PROMPT], SamplingParams(max_tokens=0))


@pytest.mark.parametrize("budget", [7, 64])
def test_a_prompt_as_long_as_the_model_allows_is_scored(llm: LLM, model: str, budget: int) -> None:
    """C50, C1: max_model_len tokens, as no answer follows; one more, or one of output, is refused
    with both numbers, and so is what the pool can't hold."""
    full = LLM(
        model, max_model_len=33, block_size=4, max_num_batched_tokens=budget, backend="reference",
        num_kv_blocks=9,
    )  # fmt: skip
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=2, temperature=0)
    (output,) = full.generate([PROMPT], scoring, use_tqdm=False)
    assert values(output) == values(score(llm, PROMPT))
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("length", [])
    with pytest.raises(RequestError, match=r"34.*33"):
        full.generate([[*PROMPT, 5]], scoring, use_tqdm=False)
    with pytest.raises(RequestError, match=r"34.*33"):
        full.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    (after,) = full.generate([PROMPT[:32]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(after.outputs[0].token_ids) == 1
    full.close()
    small = LLM(model, max_model_len=33, block_size=4, num_kv_blocks=8, backend="reference")
    with pytest.raises(RequestError, match=r"33.*32"):
        small.generate([PROMPT], scoring, use_tqdm=False)
    small.close()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [10, 64])
def test_answers_to_one_prompt_score_it_once(
    llm: LLM, model: str, caching: bool, budget: int
) -> None:
    """R34, C44: the first of n answers scores the prompt for all; each comes with all scores."""
    many = LLM(
        model, max_num_batched_tokens=budget, enable_prefix_caching=caching, block_size=4,
        **SETTINGS,
    )  # fmt: skip
    runner = many._engine.core.executor._runner  # type: ignore[attr-defined]
    original, scored = runner.sampler.score, []

    def note(logits: Any, token_ids: Any, num_tops: Any) -> Any:
        scored.extend(token_ids)
        return original(logits, token_ids, num_tops)

    runner.sampler.score = note
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 3, "ignore_eos": True}
    params = SamplingParams(n=3, prompt_logprobs=2, logprobs=0, **settings)
    events = list(many.stream(PROMPT, params))
    first_events = [next(e for e in events if e.index == index) for index in range(3)]
    assert all(len(event.prompt_logprobs or ()) == len(PROMPT) for event in first_events)
    assert len({event.prompt_logprobs for event in first_events}) == 1
    assert scored == PROMPT[1:]
    assert many.stats().recomputed_tokens == 0
    (output,) = many.generate([PROMPT], params, use_tqdm=False)
    assert values(output) == values(score(llm, PROMPT))
    many.close()


@pytest.mark.parametrize("steps_before", [1, 2, 4, 6])
def test_a_leader_preempted_while_it_scores(llm: LLM, model: str, steps_before: int) -> None:
    """C43: the others take what it found, and find the rest themselves; no score comes twice."""
    many = LLM(model, max_num_batched_tokens=10, block_size=4, **SETTINGS)
    scheduler = many._engine.core.scheduler
    original, ran = scheduler.schedule, 0

    def schedule() -> Any:
        nonlocal ran
        ran += 1
        if ran == steps_before + 1:
            assert scheduler.preempt(0)
        return original()

    scheduler.schedule = schedule  # type: ignore[method-assign]
    params = SamplingParams(n=3, prompt_logprobs=2, max_tokens=4, seed=3, ignore_eos=True)
    events = list(many.stream(PROMPT, params))
    wanted = score(llm, PROMPT).prompt_logprobs
    found = [e.prompt_logprobs for e in events if e.prompt_logprobs is not None]
    assert found == [tuple(wanted or ())] * 3
    many.close()


def test_logits_of_a_prompt_never_lie_in_memory_all_at_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R62: 33 rows through the LM head 4 at a time: the same scores."""
    whole = values(score(llm, PROMPT))
    monkeypatch.setattr("octavo.models.llama.EXTRA_ROWS", 4)
    assert values(score(llm, PROMPT)) == whole


def test_a_row_whose_scoring_fails_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """C37, C106: numbers that are none end that request; its neighbour answers as if alone."""
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (alone,) = llm.generate([PROMPT[:5]], plain, use_tqdm=False)
    runner = llm._engine.core.executor._runner  # type: ignore[attr-defined]
    monkeypatch.setattr(runner.sampler, "score", lambda *args: 1 / 0)
    scoring = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    failed, other = llm.generate([PROMPT, PROMPT[:5]], [scoring, plain], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "scoring the prompt failed" in str(failed.outputs[0].error)
    assert failed.prompt_logprobs is None
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("budget", [2048, 32, 7])
def test_an_answer_that_fails_has_no_scores_however_its_prompt_was_cut(
    model: str, budget: int
) -> None:
    """What the grammar asks for is not allowed: an error, that comes with the last chunk."""
    llm = LLM(model, max_num_batched_tokens=budget, **SETTINGS)
    output = score(llm, PROMPT, grammar=GrammarSpec.regex("[0-9]+"), allowed_token_ids=(5,))
    assert output.outputs[0].finish_reason == "error"
    assert output.prompt_logprobs is None
    llm.close()


def test_bad_words_are_barred_in_every_answer(llm: LLM) -> None:
    """C40: with and without a space in front, in all n answers, and no BOS becomes a part."""
    tokenizer = llm.tokenizer
    word = "the"
    barred = {tuple(tokenizer.encode(x, add_special_tokens=False)) for x in (word, " " + word)}
    sequences = llm._engine.inputs.requests(
        [5], SamplingParams(bad_words=[word], n=3), request_id=0, arrival_time=0.0
    )
    assert [set(r.params.bad_words_token_ids) for r in sequences] == [barred] * 3
    assert all(r.params.bad_words == () for r in sequences)
    with pytest.raises(RequestError, match="bad_words"):
        llm.generate([PROMPT], SamplingParams(bad_words=["the" * 99]))
