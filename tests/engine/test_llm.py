"""LLM over a tiny model file: the Python interface as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf, write_tiny_hf
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, EngineDead, ModelLoadError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("llm") / "tiny.gguf"))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    made = LLM(model=model, num_kv_blocks=64, max_model_len=128)
    yield made
    made.close()


def test_the_articles_call_works(model: str) -> None:
    """R110: enable_chunked_prefill and max_num_batched_tokens; the budget caps each step."""
    llm = LLM(model=model, enable_chunked_prefill=True, max_num_batched_tokens=16)
    whole = LLM(model=model, enable_chunked_prefill=False, max_num_batched_tokens=2048)
    prompt = [3 + i for i in range(100)]
    chunked = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert chunked.outputs[0].token_ids == whole.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert llm.stats().steps == whole.stats().steps + 100 // 16  # 7 chunks instead of 1


def test_prompts_in_every_form_agree(llm: LLM) -> None:
    text = "hello there"
    ids = llm.tokenizer.encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    answers = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    assert answers[0].prompt == text
    assert all(answer.prompt_token_ids == ids for answer in answers)
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == answers[0].outputs[0].token_ids


def test_chat_is_the_template_then_generate(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.tokenizer.apply_chat_template(messages)
    (by_chat,) = llm.chat(messages, GREEDY)
    (by_hand,) = llm.generate([prompt], GREEDY)
    assert by_chat.outputs[0].token_ids == by_hand.outputs[0].token_ids
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_stream_joined_is_generate(llm: LLM) -> None:
    """The plain answer is the fold of the stream."""
    events = list(llm.stream("abc", GREEDY))
    (whole,) = llm.generate("abc", GREEDY)
    assert "".join(event.text for event in events) == whole.outputs[0].text
    assert [x for event in events for x in event.token_ids] == whole.outputs[0].token_ids


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True)):
        break
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_an_open_stream_loses_nothing_to_other_calls(llm: LLM) -> None:
    """They are refused until it ends, instead of stepping its request and losing its events."""
    stream = llm.stream("abc", GREEDY)
    events = [next(stream)]
    with pytest.raises(RequestError, match="still open"):
        llm.generate("abc", GREEDY)
    with pytest.raises(RequestError, match="still open"):
        next(llm.stream("abc", GREEDY))
    events += stream
    (whole,) = llm.generate("abc", GREEDY)
    assert "".join(event.text for event in events) == whole.outputs[0].text


def test_the_models_own_sampling_defaults_are_used(tmp_path: Path) -> None:
    """generation_config.json is JSON: its top_k may come as 50 or 50.0; the count is whole."""
    folder = write_tiny_hf(tmp_path / "tiny")
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 50.0}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **sampling}))
    llm = LLM(str(folder), max_model_len=64, num_kv_blocks=16)
    assert llm.default_params() == SamplingParams(temperature=0.6, top_p=0.9, top_k=50)
    assert llm.generate("abc")[0].outputs[0].finish_reason in ("stop", "length")
    llm.close()


def test_one_bad_prompt_is_refused_before_any_runs(llm: LLM) -> None:
    """Nothing is computed, nothing is left over."""
    steps = llm.stats().steps
    for prompts in (["good", ""], [[5], [VOCAB_SIZE]], [[5], [5] * 200]):
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="2 SamplingParams for 1"):
        llm.generate("one", [GREEDY, GREEDY])
    assert llm.stats().steps == steps
    assert llm.stats().num_waiting == 0


def test_python_values_of_the_wrong_kind_are_refused_clearly(llm: LLM) -> None:
    """No bare TypeError: a RequestError says what a prompt, params or messages look like."""
    wrong: list[Any] = [None, 3, b"bytes", ["a", None], [3.5], {"text": "a"}, [["a"]]]
    for prompts in wrong:
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY)
    for params in (5, {"temperature": 0}, [None], "greedy"):
        with pytest.raises(RequestError, match="SamplingParams"):
            llm.generate("a", params)  # type: ignore[arg-type]
    for messages in (None, [3], {"role": "user"}, [], [{"role": "user"}], "hi"):
        with pytest.raises(RequestError):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(ignore_eos="yes")  # type: ignore[arg-type]


def test_numpy_ids_and_paths_are_as_good_as_pythons(llm: LLM, model: str) -> None:
    ids = llm.tokenizer.encode("hello there")
    (by_list,) = llm.generate([ids], GREEDY)
    for prompt in (np.array(ids), np.array([ids]), [np.int64(x) for x in ids]):
        (answer,) = llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
        assert answer.outputs[0].token_ids == by_list.outputs[0].token_ids
    assert LLM(Path(model), num_kv_blocks=8, max_model_len=64).max_model_len == 64  # type: ignore[arg-type]


def test_without_params_an_answer_is_bounded(llm: LLM) -> None:
    (answer,) = llm.generate("abc")
    assert answer.outputs[0].finish_reason in ("length", "stop")
    assert len(answer.outputs[0].token_ids) <= llm.max_output_tokens(len(answer.prompt_token_ids))


def test_threads_take_turns(llm: LLM) -> None:
    """Promise 1: several threads of one LLM each get their own whole answer."""
    prompts = [[5 + i, 6, 7 + i] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda p: llm.generate([p], params, use_tqdm=False), prompts))
    assert [answer[0].outputs[0].token_ids for answer in answers] == expected


def test_a_closed_llm_says_so(model: str) -> None:
    llm = LLM(model, num_kv_blocks=8, max_model_len=64)
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("abc", GREEDY)


def test_closing_waits_for_no_open_stream_and_may_be_said_twice(model: str) -> None:
    """A stream that is open is told before its memory goes, and its answer is not lost."""
    llm = LLM(model, num_kv_blocks=8, max_model_len=64)
    stream = llm.stream("abc", GREEDY)
    events = [next(stream)]
    with pytest.raises(RequestError, match="still open"):
        llm.close()
    events += stream
    assert events[-1].finish_reason in ("length", "stop")
    llm.close()
    llm.close()


def test_an_answer_reports_its_seed_and_the_seed_repeats_it(llm: LLM) -> None:
    """Promise 1: a derived seed is returned, and gives the same answer when sent again."""
    sampled = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    (first,) = llm.generate("abc", sampled)
    again = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True, seed=first.seed)
    assert llm.generate("abc", again)[0].outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    "template", [{"chat_template": 5}, {"chat_template": b""}, {"template_kwargs": 5}]
)
def test_a_template_of_another_type_is_refused(llm: LLM, template: dict[str, Any]) -> None:
    (name,) = template
    with pytest.raises(RequestError, match=f"{name} must be") as raised:
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, **template)
    assert raised.value.param == name


def test_logprobs_and_n(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1, seed=3, max_tokens=5, logprobs=2, ignore_eos=True)
    (answer,) = llm.generate("abc", params)
    for completion in answer.outputs:
        assert completion.logprobs is not None
        assert [x.token_id for x in completion.logprobs] == completion.token_ids
        total = sum(x.logprob for x in completion.logprobs)
        assert completion.cumulative_logprob == pytest.approx(total)
    assert answer.outputs[0].token_ids != answer.outputs[1].token_ids


def test_unknown_and_impossible_settings_are_refused(model: str) -> None:
    """Nothing is ignored: a typo is an error that lists what there is."""
    with pytest.raises(ConfigError, match=r"max_num_seq.*known.*max_num_seqs"):
        LLM(model=model, max_num_seq=3)
    with pytest.raises(ConfigError, match=r"block_size.*power of two"):
        LLM(model=model, block_size=12)
    for name, value in (
        ("block_size", "16"),
        ("max_num_seqs", 2.5),
        ("seed", "7"),
        ("threads", True),
    ):
        with pytest.raises(ConfigError, match=f"{name} is .*a whole number"):
            LLM(model=model, **{name: value})
    for settings, text in (
        ({"max_model_len": 1}, "max_model_len is 1, but must be at least 2"),
        ({"file_tier_dir": "/tmp"}, "file_tier_dir is '/tmp'.*used with file_tier_memory"),
        ({"file_tier_dir": "", "file_tier_memory": 1 << 20}, "file_tier_dir is ''"),
    ):
        with pytest.raises(ConfigError, match=text):
            LLM(model=model, **settings)
    with pytest.raises(ConfigError, match=r"enable_prefix_caching is 'no'.*true or false"):
        LLM(model=model, enable_prefix_caching="no")
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(model=model, max_model_len=10**6)
    with pytest.raises(ModelLoadError, match="no-such"):
        LLM(model="/tmp/no-such-model.gguf")


def test_both_file_formats_give_the_same_answers(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """C82: the same weights as GGUF and as a Hugging Face folder, tied and untied."""
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("formats")
        gguf = LLM(str(write_tiny_gguf(folder / "tiny.gguf", tied=tied)))
        hf = LLM(str(write_tiny_hf(folder / "tiny", tied=tied)))
        answers = [
            [x.outputs[0].token_ids for x in llm.generate(["abc", "hello"], GREEDY)]
            for llm in (gguf, hf)
        ]
        assert answers[0] == answers[1]
