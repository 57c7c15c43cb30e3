"""Laws that every logits processor keeps: a kit for the tests of a package that brings one.

    from octavo.sampling.conformance import check_processor
    check_processor(MyProcessor, {"strength": 0.5})

It needs no test framework and no model; a breach is an AssertionError that says which law.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import RequestError
from ..kernels.api import Array
from .processors import Processor

VOCAB_SIZE = 301
NUM_STEPS = 24


def check_processor(cls: type[Processor], settings: Mapping[str, Any], *, seed: int = 0) -> None:
    """Raise AssertionError for the first law that `cls` with these settings breaks."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 9, 40).tolist()
    output = rng.integers(0, 9, NUM_STEPS).tolist()
    rows = [_row(rng, step) for step in range(NUM_STEPS)]

    def new(num_output: int) -> Processor:
        tokens = (*prompt, *output[:num_output])
        return cls(dict(settings), token_ids=tokens, num_prompt=len(prompt), seed=seed)

    assert cls.stage in ("logits", "truncation"), "stage is logits or truncation"
    alone, neighbour = new(0), new(0)
    for step, row in enumerate(rows):
        once = _applied(alone, row)
        assert _applied(alone, row).tobytes() == once.tobytes(), "applying twice differs"
        resumed = _applied(new(step), row)
        assert resumed.tobytes() == once.tobytes(), (
            f"after {step} tokens, a resumed request differs from one that ran through"
        )
        for other in rows[:3]:
            _applied(neighbour, other)
        beside = _applied(neighbour, row)
        assert beside.tobytes() == once.tobytes(), "other rows in between change the result"
        _check_row(cls, row, once)
        alone.append(output[step])
        neighbour.append(output[step])
    try:
        cls({**settings, "no_such_setting": 1}, token_ids=(), num_prompt=0, seed=0)
    except RequestError:
        return
    raise AssertionError("an unknown setting is not refused with a RequestError")


def _applied(processor: Processor, row: Array) -> Array:
    """A row after the processor, somewhere in a larger array that it must not touch."""
    memory = np.full(row.size + 34, 7.0, np.float32)
    inside = memory[17 : 17 + row.size]
    inside[:] = row
    processor.apply(inside)
    assert (memory[:17] == 7).all(), "it wrote before its row"
    assert (memory[17 + row.size :] == 7).all(), "it wrote past its row"
    return inside


def _check_row(cls: type[Processor], before: Array, after: Array) -> None:
    assert not np.isnan(after).any(), "it makes a NaN"
    assert (after > -np.inf).any(), "it drops every token"
    assert (after[before == -np.inf] == -np.inf).all(), "it brings a barred token back"
    if cls.stage == "truncation":
        kept = after > -np.inf
        assert (after[kept] == before[kept]).all(), "truncation changes what it keeps"


def _row(rng: np.random.Generator, step: int) -> Array:
    """Logits as they come: peaked, flat, tied, mostly barred; the best at 0."""
    row = rng.standard_normal(VOCAB_SIZE) * (0.01, 1, 4, 12)[step % 4]
    if step % 5 == 1:
        row = np.round(row)
    if step % 5 == 2:
        row[rng.random(VOCAB_SIZE) < 0.9] = -np.inf
        row[step] = 3.0
    shifted: Array = (row - row.max()).astype(np.float32)
    return shifted
