"""Which value counts: the client's, over the model's, over OpenAI's default."""

from __future__ import annotations

import pytest

from beds.fake_engine import FakeEngine
from beds.live_server import AppClient
from octavo.errors import ConfigError
from octavo.server.app import make_app

MODEL_DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 40.0, "repetition_penalty": 1.1}


def test_the_client_overrides_the_model_and_the_model_openai() -> None:
    client = AppClient(FakeEngine(sampling=MODEL_DEFAULTS))
    assert client.complete(temperature=0, top_p=None).status_code == 200
    params = client.engine.submitted[0].params
    assert params.temperature == 0
    assert params.top_p == 0.9  # null is no wish
    assert params.top_k == 40
    assert type(params.top_k) is int
    assert params.repetition_penalty == 1.1
    assert params.min_p == 0.0


def test_defaults_without_a_models_own_are_openais(client: AppClient) -> None:
    assert client.complete().status_code == 200
    params = client.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert params.max_tokens == 16


@pytest.mark.parametrize(("room", "max_tokens"), [(40, 16), (7, 7), (1, 1)])
def test_the_default_of_16_gives_way_to_what_the_engine_has_room_for(
    client: AppClient, room: int, max_tokens: int
) -> None:
    """The KV pool's limit as well as the model's: a default never refuses a prompt that fits."""
    client.engine.pool_tokens = 2 + room
    assert client.complete().status_code == 200
    assert client.engine.submitted[0].params.max_tokens == max_tokens


def test_chat_may_fill_the_models_length(client: AppClient) -> None:
    """Unset means what is left, which the engine resolves."""
    assert client.chat().status_code == 200
    assert client.engine.submitted[0].params.max_tokens is None


def test_the_newer_name_of_max_tokens_wins(client: AppClient) -> None:
    client.chat(max_completion_tokens=3, max_tokens=5)
    client.chat(max_tokens=5)
    assert [job.params.max_tokens for job in client.engine.submitted] == [3, 5]


def test_everything_that_is_set_arrives(client: AppClient) -> None:
    """No field is lost on the way to the sampler."""
    sent = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "seed": 5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x", "yz"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [1, 2],
    }
    assert client.complete(**sent, logit_bias={"4": 1.5}, logprobs=3).status_code == 200
    params = client.engine.submitted[0].params
    for name, value in sent.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == ((4, 1.5),)
    assert params.logprobs == 3


def test_a_lone_stop_string_is_a_list_of_one(client: AppClient) -> None:
    client.complete(stop="END")
    assert client.engine.submitted[0].params.stop == ("END",)


@pytest.mark.parametrize(("logprobs", "top", "wanted"), [(True, None, 0), (True, 3, 3)])
def test_logprobs_of_chat_become_a_number(
    client: AppClient, logprobs: bool, top: int | None, wanted: int
) -> None:
    client.chat(logprobs=logprobs, top_logprobs=top)
    assert client.engine.submitted[0].params.logprobs == wanted


def test_the_salt_is_the_scope_of_the_prefix_cache(client: AppClient) -> None:
    client.complete(cache_salt="tenant-7")
    client.complete()
    assert [job.cache_scope for job in client.engine.submitted] == ["tenant-7", ""]


def test_prompts_of_every_shape_reach_the_engine_as_ids(client: AppClient) -> None:
    client.complete(prompt="ab")
    client.complete(prompt=["ab", "c"])
    client.complete(prompt=[1, 2])
    client.complete(prompt=[[1, 2], [3]])
    prompts = [job.prompt for job in client.engine.submitted]
    assert prompts == [[97, 98], [97, 98], [99], [1, 2], [1, 2], [3]]


def test_a_model_with_impossible_defaults_fails_at_the_start() -> None:
    """Not at each request, as if it were the client's fault."""
    with pytest.raises(ConfigError, match="top_p"):
        make_app(FakeEngine(sampling={"top_p": 7.0}))
