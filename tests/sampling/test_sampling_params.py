"""SamplingParams refuses what can't work, and names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

BAD_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, 129, 1.5, True, "2", None],
    "temperature": [-0.1, 101, math.nan, math.inf, True, "1", None],
    "top_p": [0, 0.0, -0.1, 1.01, math.nan, True, "0.9", None],
    "top_k": [-2, 1.5, True, "3", None],
    "min_p": [-0.1, 1.1, math.nan, True, "0.1", None],
    "repetition_penalty": [0, -1, 101, math.inf, math.nan, True, "1", None],
    "presence_penalty": [-2.1, 2.1, math.nan, True, "1", None],
    "frequency_penalty": [-2.1, 2.1, math.nan, True, "1", None],
    "seed": [-2, 2**63, 2**64, 10**20, "100", 1.5, True],
    "max_tokens": [-1, 1.5, True, "5"],
    "min_tokens": [-1, 1.5, True, "5", None],
    "stop": ["", [""], [1], ["ok", None], 5, ["x"] * 65],
    "stop_token_ids": [[-1], [1.5], [True], ["1"], 5, None],
    "logprobs": [-1, 21, 1.5, True, "1"],
    "logit_bias": [{-1: 1}, {"x": 1}, {1: 101}, {1: -101}, {1: math.nan}, {1: True}, 5, None],
    "allowed_token_ids": [[], [-1], [1.5], [True], 5],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values]
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    """C34, C35, C38: refused before it reaches the worker; a bool is no number."""
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 128),
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 9999999),
        ("min_p", 1),
        ("repetition_penalty", 100),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("seed", 0),
        ("seed", -1),
        ("seed", 2**63 - 1),
        ("seed", None),
        ("max_tokens", 0),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
)
def test_the_ends_of_each_range_are_allowed(name: str, value: Any) -> None:
    """C34, C35."""
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_min_tokens_above_max_tokens_is_refused() -> None:
    """C41."""
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match=r"min_tokens is 6.*max_tokens \(5\)") as caught:
        SamplingParams(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"


def test_lists_become_tuples_so_that_params_stay_frozen_and_hashable() -> None:
    params = SamplingParams(
        stop=["a", "b"], stop_token_ids=[3, 4], allowed_token_ids=[5], logit_bias={7: 1.5, 8: -1}
    )
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3, 4)
    assert params.allowed_token_ids == (5,)
    assert params.logit_bias == ((7, 1.5), (8, -1))
    assert hash(params) == hash(
        SamplingParams(
            stop=("a", "b"),
            stop_token_ids=(3, 4),
            allowed_token_ids=(5,),
            logit_bias=((7, 1.5), (8, -1)),
        )
    )


def test_a_lone_stop_string_and_none_are_normalised() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={}).logit_bias == ()  # type: ignore[arg-type]


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False)])
def test_greedy_is_a_temperature_below_epsilon(temperature: float, greedy: bool) -> None:
    """R72."""
    assert SamplingParams(temperature=temperature).greedy is greedy
