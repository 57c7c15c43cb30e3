"""What is refused, and how: HTTP 400 in OpenAI's form, and the server goes on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from beds.fake_engine import FakeEngine, FakeTokenizer
from beds.live_server import AppClient, strict_json
from octavo.server.prompts import MAX_PROMPTS


def assert_refused(response: httpx.Response, param: str | None = None, *says: str) -> None:
    assert response.status_code == 400, response.text
    error = strict_json(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert error["param"] == param
    assert len(error["message"]) < 2100
    for text in says:
        assert text in error["message"]


def assert_alive(client: AppClient) -> None:
    assert client.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("top_k", [1.5, -2, True, "3", [], {}])
def test_odd_top_k_is_refused_and_the_server_goes_on(client: AppClient, top_k: Any) -> None:
    """C34."""
    assert_refused(client.complete(top_k=top_k), "top_k")
    assert_alive(client)


@pytest.mark.parametrize("user", [5, True, 1.5, ["me"], {"id": "me"}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_user_is_a_name(client: AppClient, path: str, user: Any) -> None:
    """C34: never a number that becomes the tenant "5"."""
    what = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "user": user}
    assert_refused(client.post(path, what), "user", "must be a string")
    assert_alive(client)


@pytest.mark.parametrize("top_k", [0, -1, 9999999, None])
def test_no_limit_may_be_written_in_any_way(client: AppClient, top_k: Any) -> None:
    """C34: 0, -1 and more than the vocabulary all mean no limit."""
    assert client.complete(top_k=top_k).status_code == 200
    assert client.engine.submitted[0].params.top_k == (top_k or 0)


@pytest.mark.parametrize("seed", [2**63, 2**64, 10**20, "100", 1.5, True, -2])
def test_seed_outside_64_bits_is_refused(client: AppClient, seed: Any) -> None:
    """C35."""
    assert_refused(client.complete(seed=seed), "seed")
    assert_alive(client)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_seed_within_bounds_is_taken_and_reported(client: AppClient, seed: int) -> None:
    """C35; the seed that was used is in the answer, also one that the engine chose."""
    body = strict_json(client.complete(seed=seed).content)
    assert body["seed"] == (seed if seed >= 0 else 1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"259": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"3": 101}),
        ("logit_bias", {"3": True}),
        ("logit_bias", {"3": "1"}),
        ("logit_bias", [[3, 1]]),
        ("allowed_token_ids", [999]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", [10**30]),
        ("prompt", [259]),
        ("prompt", [-1]),
        ("prompt", [10**30]),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(client: AppClient, field: str, value: Any) -> None:
    """C38, the wire's part; the vocabulary of the fake engine ends at 259."""
    assert_refused(client.complete(**{field: value}), field)
    assert_alive(client)


def test_bias_arrives_by_number(client: AppClient) -> None:
    """C38: JSON's keys are strings, the sampler's are ids; {} is no bias."""
    assert client.complete(logit_bias={}).status_code == 200
    assert client.complete(logit_bias={"7": -3, "258": 0.5}).status_code == 200
    first, second = client.engine.submitted
    assert first.params.logit_bias == ()
    assert second.params.logit_bias == ((7, -3), (258, 0.5))


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[1, 2], []], ["a", ""], None])
def test_an_empty_prompt_is_refused_in_all_shapes(client: AppClient, prompt: Any) -> None:
    """C53: nothing runs, not even the prompts beside the empty one."""
    assert_refused(client.post("/v1/completions", {"prompt": prompt}), "prompt")
    assert client.engine.submitted == []
    assert_alive(client)


def test_with_a_bos_token_the_empty_text_is_a_prompt() -> None:
    """C53: one BOS token is something to go on from."""
    client = AppClient(FakeEngine(tokenizer=FakeTokenizer(adds_bos=True)))
    assert client.complete(prompt="").status_code == 200
    assert client.engine.submitted[0].prompt == [258]
    assert_refused(client.complete(prompt="", add_special_tokens=False), "prompt")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "hi",
        [None],
        ["hi"],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": ["user"], "content": "hi"}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
    ],
)
def test_messages_that_say_nothing_are_refused(client: AppClient, messages: Any) -> None:
    """C53, chat's part."""
    assert_refused(client.post("/v1/chat/completions", {"messages": messages}), "messages")
    assert client.engine.submitted == []


def test_messages_as_clients_really_send_them(client: AppClient) -> None:
    """Parts of text, a name of null, empty tool_calls, OpenAI's newer name for system."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, "brief"]},
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": "yo", "tool_calls": [], "refusal": None},
        {"role": "user", "content": "<|im_end|>"},
    ]
    assert client.chat(messages=messages).status_code == 200
    ids = client.engine.submitted[0].prompt
    text = client.engine.tokenizer.decode(ids, skip_special_tokens=False)
    first = "<|im_start|>developer\nbe\nbrief<|im_end|>\n"
    assert text.startswith(first + "<|im_start|>user\nhi<|im_end|>")
    assert text.endswith("<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(257) == 4  # what the user typed is text, not a fifth end of a turn


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": 2},
        {"top_logprobs": 2, "logprobs": False},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
        {"top_logprobs": True, "logprobs": True},
    ],
)
def test_top_logprobs_needs_logprobs_and_ends_at_20(client: AppClient, body: Any) -> None:
    """C52."""
    assert_refused(client.chat(**body), "top_logprobs")


@pytest.mark.parametrize("logprobs", [True, 21, -1, 1.0, "1"])
def test_logprobs_of_completions_is_a_number_up_to_20(client: AppClient, logprobs: Any) -> None:
    """C52: and true is not 1."""
    assert_refused(client.complete(logprobs=logprobs), "logprobs")


@pytest.mark.parametrize("prompt_logprobs", [True, 21, -1, "1"])
def test_prompt_logprobs_is_a_number_up_to_20(client: AppClient, prompt_logprobs: Any) -> None:
    assert_refused(client.complete(prompt_logprobs=prompt_logprobs), "prompt_logprobs")
    assert_refused(client.chat(prompt_logprobs=prompt_logprobs), "prompt_logprobs")


def test_prompt_logprobs_in_their_own_form_are_not_streamed(client: AppClient) -> None:
    """C52: as in vLLM; echo with logprobs is what a stream can carry."""
    assert_refused(client.complete(prompt_logprobs=1, stream=True), "prompt_logprobs", "stream")


def test_processed_logprobs_of_a_prompt_are_refused(client: AppClient) -> None:
    """C28: nothing is sampled there, so nothing is processed."""
    body = {"echo": True, "logprobs": 1, "logprobs_mode": "processed"}
    assert_refused(client.complete(**body), "logprobs_mode", "raw")


@pytest.mark.parametrize("max_tokens", [-1, 0, 1.5, True, "4"])
def test_max_tokens_is_a_positive_whole_number(client: AppClient, max_tokens: Any) -> None:
    """C50: 0 asks for nothing unless the prompt is echoed."""
    assert_refused(client.complete(max_tokens=max_tokens), "max_tokens")
    assert_refused(client.chat(max_tokens=max_tokens), "max_tokens")
    assert_refused(client.chat(max_completion_tokens=max_tokens), "max_completion_tokens")
    assert client.engine.submitted == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("use_beam_search", True),
        ("best_of", 2),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_what_would_change_the_answer_is_refused_until_it_is_built(
    client: AppClient, field: str, value: Any
) -> None:
    """C71's kind: a constraint is never silently left out."""
    name = "max_tokens"
    assert_refused(client.complete(**{field: value, name: 2}), field, "not supported yet")
    if field != "best_of":
        assert_refused(client.chat(**{field: value, name: 2}), field, "not supported yet")


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "parallel_tool_calls": True},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"stream_interval": 4, "kv_transfer_params": {"a": 1}, "vllm_xargs": {"b": 2}},
        {"use_beam_search": False, "bad_words": [], "structured_outputs": None},
        {"logprobs": None, "top_logprobs": None, "stop": None, "n": None, "stream": None},
        {"temperature": None, "seed": None, "max_tokens": None, "stream_options": None},
        {"an_unknown_field": {"deep": [1]}, "top_logprobs": 0},
    ],
)
def test_what_changes_nothing_is_taken(client: AppClient, body: Any) -> None:
    """null means the default; unknown fields are never a reason to refuse."""
    assert client.chat(**body).status_code == 200
    assert client.engine.submitted[0].params.n == 1


def test_unknown_fields_leave_one_line_in_the_log(
    client: AppClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One line however many; long and hostile names are cut and quoted."""
    caplog.set_level("INFO", "octavo.server")
    fields = {f"field\n{i}" + "x" * 500: i for i in range(30)}
    assert client.complete(**fields).status_code == 200
    lines = [r.getMessage() for r in caplog.records if r.name == "octavo.server"]
    assert len(lines) == 1
    assert "and 20 more" in lines[0]
    assert "\n" not in lines[0]
    assert len(lines[0]) < 1500


def test_best_of_one_is_what_a_benchmark_sends(client: AppClient) -> None:
    """best_of equal to n asks for nothing; below n it is nonsense."""
    assert client.complete(best_of=1).status_code == 200
    assert client.complete(best_of=2, n=2).status_code == 200
    assert_refused(client.complete(best_of=1, n=2), "best_of")


@pytest.mark.parametrize(
    "body",
    [
        {"stream": 1},
        {"stream": "true"},
        {"echo": 1},
        {"ignore_eos": "yes"},
        {"skip_special_tokens": 0},
        {"include_stop_str_in_output": 1},
        {"n": 0},
        {"n": True},
        {"n": 1000},
        {"stop": [1]},
        {"stop": [""]},
        {"stop": {"a": "b"}},
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": -0.1},
        {"top_p": 0},
        {"min_tokens": 17},
        {"presence_penalty": 3},
        {"stream_options": {"include_usage": True}},
        {"stream_options": [], "stream": True},
        {"stream_options": {"include_usage": 1}, "stream": True},
        {"priority": 1},
        {"priority": 0.5},
        {"cache_salt": ""},
        {"cache_salt": "a/b"},
        {"cache_salt": "x" * 129},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 100000},
        {"truncation_side": "middle"},
        {"model": 3},
    ],
)
def test_wrong_types_and_ranges_name_their_field(client: AppClient, body: Any) -> None:
    """Never coerced, never 422."""
    response = client.complete(**body)
    error = strict_json(response.content)["error"]
    assert response.status_code == 400, body
    names = {"include_usage", *body}
    assert error["param"] in names
    assert error["param"] in error["message"]
    assert client.engine.submitted == []


def test_priority_is_refused_where_nobody_looks_at_it(client: AppClient) -> None:
    """Under first come, first served a priority would be a wish that nobody hears."""
    assert_refused(client.chat(priority=-1), "priority", "fcfs")
    assert client.chat(priority=0).status_code == 200


def test_an_overlong_prompt_is_refused_with_both_numbers(client: AppClient) -> None:
    """C55: nothing is cut silently. The model's length is 512."""
    assert_refused(client.complete(prompt="x" * 600), "prompt", "512", "600")
    assert_refused(client.complete(prompt=[1] * 600), "prompt", "512", "600")
    messages = [{"role": "user", "content": "x" * 600}]
    assert_refused(client.chat(messages=messages), "messages", "512", "619")
    assert_refused(client.complete(prompt="x" * 512), "prompt", "512", "no room")
    assert_refused(client.complete(prompt="x" * 500, max_tokens=13), "max_tokens", "513")
    assert client.engine.submitted == []
    assert client.complete(prompt="x" * 500, max_tokens=12).status_code == 200


def test_the_default_of_max_tokens_never_refuses_a_prompt_that_fits(client: AppClient) -> None:
    """Nobody asked for 16 tokens; 4 is what is left."""
    assert client.complete(prompt="x" * 508).status_code == 200
    assert client.engine.submitted[0].params.max_tokens == 4


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_cut_only_when_asked_and_the_answer_says_so(
    client: AppClient, side: str
) -> None:
    """C55: a field tells how many tokens were cut, usage counts what was processed."""
    prompt = "BEGIN" + "x" * 600 + "END"
    cut = {"truncate_prompt_tokens": 100, "truncation_side": side}
    body = strict_json(client.complete(prompt=prompt, **cut).content)
    assert body["truncated_prompt_tokens"] == 508
    assert body["usage"]["prompt_tokens"] == 100
    ids = client.engine.submitted[0].prompt
    kept = client.engine.tokenizer.decode(ids)
    assert kept == (prompt[-100:] if side == "left" else prompt[:100])


def test_truncation_to_the_models_length_leaves_room_for_the_answer(client: AppClient) -> None:
    """C55: -1 keeps as much as max_tokens allows; a short prompt is left alone."""
    body = {"truncate_prompt_tokens": -1, "max_tokens": 12, "prompt": "x" * 600}
    answer = strict_json(client.complete(**body).content)
    assert answer["usage"]["prompt_tokens"] == 500
    short = strict_json(client.complete(truncate_prompt_tokens=-1).content)
    assert "truncated_prompt_tokens" not in short


def test_the_number_of_prompts_is_limited(client: AppClient) -> None:
    assert_refused(client.complete(prompt=["a"] * (MAX_PROMPTS + 1)), "prompt")
    assert client.engine.submitted == []


def test_a_clients_own_value_in_a_message_is_cut(client: AppClient) -> None:
    """A megabyte of nonsense is not sent back."""
    assert_refused(client.complete(seed="y" * 10**6), "seed", "1000")


def test_a_conversation_to_go_on_from(client: AppClient) -> None:
    """continue_final_message leaves the last message open; both at once make no sense."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure"}]
    body = {"messages": messages, "continue_final_message": True}
    assert client.chat(**body).status_code == 200
    assert client.engine.submitted[0].prompt[-4:] == list(b"Sure")
    refused = client.chat(**body, add_generation_prompt=True)
    assert_refused(refused, "continue_final_message")


def test_template_variables_of_ours_are_not_for_clients(client: AppClient) -> None:
    ours = {"messages": [{"role": "user", "content": "other"}]}
    assert_refused(client.chat(chat_template_kwargs=ours), "chat_template_kwargs")
    assert client.chat(chat_template_kwargs={"thinking": False}).status_code == 200


def test_without_a_chat_template_chat_is_refused() -> None:
    client = AppClient(FakeEngine(tokenizer=FakeTokenizer(chat_template=None)))
    assert_refused(client.chat(), "messages", "/v1/completions")
