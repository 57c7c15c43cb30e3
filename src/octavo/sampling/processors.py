"""Logits processors: the sampler's plug-ins. Three are built in; more come by entry point.

A processor is one small object of one request, made when it starts or resumes and told every
token of its output: it can't see the batch, so it can't depend on it. A package brings its own by
naming a class under the entry point group "octavo.logits_processors"; octavo.sampling.conformance
tests it. A request asks by name: logits_processors={"dry": {"multiplier": 0.8}}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from ..errors import RequestError
from ..kernels.api import Array
from ..sampling_params import SamplingParams
from .noise import random_bits

GROUP = "octavo.logits_processors"
Stage = Literal["logits", "truncation"]


class Processor(Protocol):
    """What a plug-in class provides."""

    stage: ClassVar[Stage]
    """logits: step 2, after the biases and before the penalties. truncation: step 4b, on logits
    after temperature, shifted so that the best is 0."""

    def __init__(
        self, settings: Mapping[str, Any], *, token_ids: Sequence[int], num_prompt: int, seed: int
    ) -> None:
        """Raise RequestError for settings that are wrong or unknown. token_ids are prompt and
        output so far; state made from them must equal state that was appended to."""
        ...

    def apply(self, logits: Array) -> None:
        """Change one row [V] float32 in place, without NaN: a token is dropped by -inf, and not
        all of them may be dropped. The same state and the same row give the same bits."""
        ...

    def append(self, token_id: int) -> None:
        """The output grew by this token."""
        ...


def take(settings: Mapping[str, Any], name: str, **known: tuple[Any, float, float]) -> list[Any]:
    """Values of settings by name: (default, lowest, highest). Raises RequestError."""
    param = "logits_processors"
    for key in settings:
        if key not in known:
            text = f"{name} has no setting {key!r}; it knows {', '.join(known)}"
            raise RequestError(text, param=param)
    values = []
    for key, (default, low, high) in known.items():
        value = settings.get(key, default)
        kinds = (int,) if isinstance(default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            kind = "whole number" if kinds == (int,) else "number"
            text = f"{name}: {key} is {value!r}, but must be a {kind} from {low:g} to {high:g}"
            raise RequestError(text, param=param)
        values.append(value)
    return values


class Dry:
    """Don't repeat yourself (p-e-w, text-generation-webui PR 5677): a token that would go on with
    a repetition of length n >= allowed_length loses multiplier * base^(n - allowed_length).

    `_lengths[i]` is how many tokens before position i equal the last tokens of the sequence; one
    more token makes each of them one longer, or 0. So a step costs one pass over the sequence.
    """

    stage: ClassVar[Stage] = "logits"

    def __init__(
        self, settings: Mapping[str, Any], *, token_ids: Sequence[int], num_prompt: int, seed: int
    ) -> None:
        settings = dict(settings)
        breakers = settings.pop("breaker_ids", ())
        if not isinstance(breakers, list | tuple) or not all(type(i) is int for i in breakers):
            text = "dry: breaker_ids must be a list of token ids"
            raise RequestError(text, param="logits_processors")
        self._multiplier, self._base, self._allowed_length = take(
            settings, "dry", multiplier=(0.8, 0, 100), base=(1.75, 1, 10), allowed_length=(2, 1, 99)
        )
        self._breakers = frozenset(breakers)
        self._tokens = np.zeros(max(64, 2 * len(token_ids)), np.int64)
        self._lengths = np.zeros(self._tokens.size, np.int64)
        self._count = 0
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        count = self._count
        if count == self._tokens.size:
            self._tokens, self._lengths = (
                np.concatenate([x, np.zeros_like(x)]) for x in (self._tokens, self._lengths)
            )
        lengths, tokens = self._lengths, self._tokens
        if token_id in self._breakers:
            lengths[: count + 1] = 0
        else:
            # Before position i + 1 stands tokens[i]; at i = 0 nothing stands before it.
            longer = np.where(tokens[:count] == token_id, lengths[:count] + 1, 0)
            lengths[1 : count + 1] = longer
        tokens[count] = token_id
        self._count = count + 1

    def apply(self, logits: Array) -> None:
        tokens, lengths = self._tokens[: self._count], self._lengths[: self._count]
        long = np.flatnonzero((lengths >= self._allowed_length) & (tokens < logits.size))
        if long.size:
            longest = np.zeros(logits.size, np.int64)
            np.maximum.at(longest, tokens[long], lengths[long])
            ids = np.flatnonzero(longest)
            # Beyond e^80 any penalty bars the token as well, and float32 would overflow.
            powers = np.minimum((longest[ids] - self._allowed_length) * math.log(self._base), 80.0)
            logits[ids] -= (self._multiplier * np.exp(powers)).astype(np.float32)


class Xtc:
    """Exclude top choices (p-e-w, text-generation-webui PR 6335): with `probability`, drop all
    tokens at or above `threshold` but the least likely of them."""

    stage: ClassVar[Stage] = "truncation"

    def __init__(
        self, settings: Mapping[str, Any], *, token_ids: Sequence[int], num_prompt: int, seed: int
    ) -> None:
        self._probability, self._threshold = take(
            settings, "xtc", probability=(0.5, 0, 1), threshold=(0.1, 0, 1)
        )
        self._seed = seed
        self._position = len(token_ids)

    def append(self, token_id: int) -> None:
        self._position += 1

    def apply(self, logits: Array) -> None:
        # A stream of its own: the token ids of the draw are below 2**31.
        bits = random_bits(self._seed, self._position, np.array([2**40]))
        if (float(bits[0]) + 0.5) * 2.0**-32 >= self._probability:
            return
        weights = np.exp(logits, dtype=np.float64)
        top = np.flatnonzero(weights >= self._threshold * weights.sum())
        if top.size > 1:
            least = top.size - 1 - int(logits[top][::-1].argmin())  # of equals, the highest id
            logits[np.delete(top, least)] = -np.inf


class Typical:
    """Locally typical sampling (Meister et al. 2023): keep the tokens whose information is nearest
    to the entropy, until their probabilities sum to p."""

    stage: ClassVar[Stage] = "truncation"

    def __init__(
        self, settings: Mapping[str, Any], *, token_ids: Sequence[int], num_prompt: int, seed: int
    ) -> None:
        (self._p,) = take(settings, "typical", p=(0.95, 0.001, 1))

    def append(self, token_id: int) -> None:
        pass

    def apply(self, logits: Array) -> None:
        if self._p == 1:
            return
        possible = np.flatnonzero(logits > -np.inf)
        scaled = logits[possible].astype(np.float64)
        weights = np.exp(scaled)
        total = weights.sum()
        probabilities = weights / total
        information = math.log(total) - scaled
        entropy = float((probabilities * information).sum())
        order = np.argsort(np.abs(information - entropy), kind="stable")
        sums = np.cumsum(probabilities[order])
        num_kept = int(np.searchsorted(sums, self._p, side="left")) + 1
        logits[possible[order[num_kept:]]] = -np.inf


BUILT_IN: dict[str, type[Processor]] = {"dry": Dry, "xtc": Xtc, "typical": Typical}


@cache
def find(name: str) -> type[Processor]:
    """The class of that name: built in, or of an entry point. Raises RequestError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = entry_points(group=GROUP)
    if name in found.names:
        loaded: type[Processor] = found[name].load()
        return loaded
    known = ", ".join(sorted({*BUILT_IN, *found.names}))
    text = f"there is no logits processor {name[:64]!r}; there are {known}"
    raise RequestError(text, param="logits_processors")


def make(
    params: SamplingParams, token_ids: Sequence[int], *, num_prompt: int, seed: int
) -> list[Processor]:
    """Those that a request asks for, in its order. Raises RequestError."""
    return [
        find(name)(dict(settings), token_ids=token_ids, num_prompt=num_prompt, seed=seed)
        for name, settings in params.logits_processors
    ]
