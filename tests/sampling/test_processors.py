"""Logits processors: the built-in ones, the kit that checks any, and how others are found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.sampler_rows import make_row, sample_many, sample_one, sample_token
from octavo.errors import RequestError
from octavo.messages import RowFault
from octavo.sampling import processors
from octavo.sampling.conformance import check_processor
from octavo.sampling.processors import BUILT_IN, Dry, Typical, Xtc
from octavo.sampling_params import SamplingParams


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dry", {}),
        ("dry", {"multiplier": 2, "base": 1.1, "allowed_length": 1, "breaker_ids": [3]}),
        ("xtc", {}),
        ("xtc", {"probability": 1.0, "threshold": 0.02}),
        ("typical", {"p": 0.5}),
        ("typical", {"p": 0.001}),
    ],
)
def test_built_in_processors_pass_the_kit(name: str, settings: dict[str, Any], seed: int) -> None:
    check_processor(BUILT_IN[name], settings, seed=seed)


class Broken:
    """Breaks one law, by settings."""

    stage: ClassVar[processors.Stage] = "logits"

    def __init__(self, settings: Mapping[str, Any], *, token_ids: Sequence[int], **rest: Any):
        self.law, self.lax = settings["law"], "no_such_setting" in settings
        self.count = 0
        self.resumed_with = len(token_ids)
        if self.lax and self.law != "an unknown setting":
            raise RequestError("unknown", param="logits_processors")

    def append(self, token_id: int) -> None:
        pass

    def apply(self, logits: np.ndarray) -> None:
        self.count += 1
        match self.law:
            case "twice":
                logits[0] = -self.count
            case "resumed":
                logits[0] = -self.resumed_with
            case "NaN":
                logits[0] = math.nan
            case "every token":
                logits[:] = -np.inf
            case "back":
                logits[logits == -np.inf] = -1
            case "keeps":
                logits *= 2


class BrokenTruncation(Broken):
    stage: ClassVar[processors.Stage] = "truncation"


@pytest.mark.parametrize(
    "law", ["twice", "resumed", "NaN", "every token", "back", "keeps", "an unknown setting"]
)
def test_the_kit_sees_each_breach(law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_processor(BrokenTruncation if law == "keeps" else Broken, {"law": law})


def slow_dry(tokens: list[int], params: dict[str, Any], vocab_size: int) -> list[float]:
    """Straight from the definition: for each next token, the longest repetition it goes on with."""
    penalties = [0.0] * vocab_size
    for token in range(vocab_size):
        longest = 0
        for i in range(1, len(tokens)):
            if tokens[i] != token:
                continue
            length = 0
            while (
                length < i
                and tokens[i - 1 - length] == tokens[-1 - length]
                and tokens[-1 - length] not in params["breaker_ids"]
            ):
                length += 1
            longest = max(longest, length)
        if longest >= params["allowed_length"]:
            over = longest - params["allowed_length"]
            penalties[token] = params["multiplier"] * params["base"] ** over
    return penalties


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    allowed_length=st.integers(1, 3),
    breaker_ids=st.lists(st.integers(0, 3), max_size=1),
)
def test_dry_is_its_definition(
    tokens: list[int], allowed_length: int, breaker_ids: list[int]
) -> None:
    settings = {"multiplier": 0.5, "base": 1.5, "allowed_length": allowed_length}
    settings["breaker_ids"] = breaker_ids
    dry = Dry(settings, token_ids=tokens[:1], num_prompt=1, seed=0)
    for token_id in tokens[1:]:
        dry.append(token_id)
    logits = np.zeros(5, np.float32)
    dry.apply(logits)
    assert (-logits).tolist() == pytest.approx(slow_dry(tokens, settings, 5), rel=1e-5)


def test_xtc_drops_all_top_choices_but_the_least() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    always = Xtc({"probability": 1, "threshold": 0.15}, token_ids=(), num_prompt=0, seed=0)
    row = (logits - logits.max()).astype(np.float32)
    always.apply(row)
    assert np.isinf(row).tolist() == [True, True, False, False]
    one = np.array([0, -9, -9], np.float32)
    always.apply(one)
    assert one.tolist() == [0, -9, -9], "a single top choice stays"


def test_xtc_happens_with_its_probability() -> None:
    """The draw of each position is its own; 4 standard deviations of 2,000 draws."""
    params = SamplingParams(logits_processors={"xtc": {"probability": 0.3, "threshold": 0.4}})
    counts = sample_many(np.log([0.5, 0.45, 0.05]), params, 2000)
    wanted = 2000 * (0.7 * 0.5)
    assert abs(counts[0] - wanted) < 4 * math.sqrt(wanted * 0.65)


def test_typical_keeps_what_is_nearest_to_the_entropy() -> None:
    """Meister et al.: the single likeliest token may be the least typical."""
    probabilities = np.array([0.4, 0.15, 0.15, 0.15, 0.15])
    entropy = -(probabilities * np.log(probabilities)).sum()
    assert abs(-math.log(0.15) - entropy) < abs(-math.log(0.4) - entropy)
    row = np.log(probabilities / 0.4).astype(np.float32)
    Typical({"p": 0.5}, token_ids=(), num_prompt=0, seed=0).apply(row)
    assert np.isinf(row).tolist() == [True, False, False, False, False]
    counts = sample_many(
        np.log(probabilities), SamplingParams(logits_processors={"typical": {"p": 0.5}}), 400
    )
    assert counts[0] == 0
    assert counts.sum() == 400


def test_processed_logprobs_see_what_processors_leave() -> None:
    """C28, R69: and a greedy row passes through the stage before it, not the one after."""
    params = SamplingParams(
        logprobs=2, logprobs_mode="processed", logits_processors={"typical": {"p": 0.001}}
    )
    result = sample_one([3.0, 1.0], make_row(params))
    assert not isinstance(result, RowFault)
    assert result.logprobs is not None
    assert result.logprobs.logprob == 0.0
    greedy = SamplingParams(temperature=0, logits_processors={"dry": {"multiplier": 50}})
    assert sample_token([2.0, 1.0], greedy, prompt=[1, 1, 1, 0, 1, 1, 1]) == 1
    assert sample_token([9.0, 5.0], greedy, prompt=[1, 1, 1, 0, 1, 1, 1]) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"nobody": {}},
        {"dry": {"multiplier": -1}},
        {"dry": {"strength": 1}},
        {"dry": {"breaker_ids": "x"}},
        {"xtc": {"probability": True}},
        {"typical": {"p": 0}},
    ],
)
def test_wrong_settings_are_refused_at_the_door(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        processors.make(SamplingParams(logits_processors=given), (), num_prompt=0, seed=0)  # type: ignore[arg-type]
    assert caught.value.param == "logits_processors"


@pytest.mark.parametrize("given", ["dry", [1], {"dry": 3}, {str(i): {} for i in range(9)}])
def test_logits_processors_are_names_with_settings(given: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors"):
        SamplingParams(logits_processors=given)


class Ban7:
    """A third party's: token 7 never."""

    stage: ClassVar[processors.Stage] = "logits"

    def __init__(self, settings: Mapping[str, Any], **rest: Any) -> None:
        processors.take(settings, "ban7")

    def append(self, token_id: int) -> None:
        pass

    def apply(self, logits: np.ndarray) -> None:
        logits[7] = -np.inf


def test_a_package_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By entry point: found by name, checked by the kit, run by the sampler."""
    point = EntryPoint("ban7", f"{__name__}:Ban7", processors.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Ban7)
    monkeypatch.setattr(processors, "entry_points", lambda group: EntryPoints([point]))
    processors.find.cache_clear()
    check_processor(Ban7, {})
    params = SamplingParams(temperature=0, logits_processors={"ban7": {}})  # type: ignore[arg-type]
    assert sample_token([0, 0, 1, 0, 0, 0, 0, 9], params) == 2
    with pytest.raises(RequestError, match="there are ban7, dry, typical, xtc"):
        processors.find("ban8")
    processors.find.cache_clear()
