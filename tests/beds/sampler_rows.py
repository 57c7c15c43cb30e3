"""Short ways to build rows and to sample them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.messages import NewRequest, RowFault, SampledToken
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import RowState
from octavo.sampling_params import SamplingParams


def make_row(
    params: SamplingParams,
    *,
    row: int = 0,
    seed: int = 0,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> RowState:
    """A request that has generated `output`, as it resumes."""
    tokens = (*prompt, *output)
    start = NewRequest(row, row, tokens, len(prompt), params, seed, tuple(eos))
    return RowState(start)


def sample(logits: Any, rows: Sequence[RowState]) -> list[SampledToken | RowFault]:
    """Sample a copy of logits [S, V]."""
    logits = np.array(logits, dtype=np.float32)
    return Sampler(logits.shape[1]).sample(logits, rows)


def sample_one(logits: Any, state: RowState) -> SampledToken | RowFault:
    """Sample logits [V] alone."""
    return sample([logits], [state])[0]


def sample_token(logits: Any, params: SamplingParams, **row: Any) -> int:
    """Token id for logits [V]."""
    result = sample_one(logits, make_row(params, **row))
    assert isinstance(result, SampledToken), result
    return result.token_id


def sample_many(logits: Any, params: SamplingParams, num: int, *, first_seed: int = 0) -> Any:
    """counts [V] of tokens over `num` consecutive seeds, at one position."""
    logits = np.array(logits, dtype=np.float32)
    rows = [make_row(params, row=i, seed=first_seed + i) for i in range(num)]
    results = sample(np.tile(logits, (num, 1)), rows)
    tokens = [r.token_id for r in results if isinstance(r, SampledToken)]
    assert len(tokens) == num
    return np.bincount(tokens, minlength=logits.size)
