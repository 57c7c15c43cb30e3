"""The law of the room: a row's result depends on that row alone, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.sampler_rows import make_row
from octavo.messages import RowFault, SampledToken
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import RowState
from octavo.sampling_params import SamplingParams


def maybe(values: st.SearchStrategy[Any], default: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(default), values)


token_ids = st.integers(0, 70)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0, 100.0]),
    top_p=maybe(st.floats(0.01, 0.9999), 1.0),
    top_k=maybe(st.integers(1, 80), 0),
    min_p=maybe(st.floats(0.0001, 1.0), 0.0),
    repetition_penalty=maybe(st.floats(0.1, 10.0), 1.0),
    presence_penalty=maybe(st.floats(-2, 2), 0.0),
    frequency_penalty=maybe(st.floats(-2, 2), 0.0),
    logit_bias=maybe(st.dictionaries(token_ids, st.floats(-100, 100), max_size=3), ()),
    allowed_token_ids=maybe(st.lists(token_ids, min_size=1, max_size=9), None),
    stop_token_ids=st.lists(token_ids, max_size=2),
    min_tokens=st.integers(0, 2),
    logprobs=maybe(st.integers(0, 20), None),
    logprobs_mode=st.sampled_from(["raw", "processed"]),
    logprob_token_ids=maybe(st.lists(token_ids, max_size=3), ()),
    bad_words_token_ids=maybe(
        st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3), ()
    ),
)
row_strategy = st.fixed_dictionaries(
    {
        "params": params_strategy,
        "seed": st.integers(0, 2**64 - 1),
        "prompt": st.lists(token_ids, min_size=1, max_size=5),
        "output": st.lists(token_ids, max_size=4),
        "eos": st.lists(token_ids, max_size=2),
        "logits_seed": st.integers(0, 2**32 - 1),
        "kind": st.sampled_from(
            ["normal", "normal", "flat", "ties", "peaked", "nan", "inf", "dead", "barred"]
        ),
    }
)


def logits_of(row: dict[str, Any], vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(row["logits_seed"])
    logits = rng.standard_normal(vocab_size) * 4
    match row["kind"]:
        case "flat":
            logits = logits * 0 + 1
        case "ties":
            logits = np.round(logits)
        case "peaked":
            logits[rng.integers(vocab_size)] += 30
        case "nan":
            logits[rng.integers(0, vocab_size, 3)] = math.nan
        case "inf":
            logits[rng.integers(0, vocab_size, 2)] = math.inf
        case "dead":
            logits[:] = math.nan
        case "barred":
            logits[rng.random(vocab_size) < 0.9] = -math.inf
    return logits.astype(np.float32)


def bits_of(result: SampledToken | RowFault) -> str:
    """A result as text with every bit of its floats."""
    if isinstance(result, RowFault):
        return repr(result)
    if result.logprobs is None:
        return f"{result.row} {result.token_id}"
    logprob, rank, top, named = result.logprobs
    alternatives = [(i, x.hex()) for i, x in (*top, *named)]
    return f"{result.row} {result.token_id} {logprob.hex()} {rank} {alternatives}"


def run(sampler: Sampler, logits: list[np.ndarray], states: list[RowState]) -> list[str]:
    return [bits_of(result) for result in sampler.sample(np.stack(logits), states)]


@pytest.mark.parametrize("vocab_size", [1, 7, 71, 4099, 40_001])
@settings(max_examples=60)
@given(data=st.data())
def test_any_batch_in_any_order_equals_each_row_alone(vocab_size: int, data: st.DataObject) -> None:
    """R72, R83, C29: all features at once; odd sizes put rows at every alignment. The batch's
    sampler is reused, so its scratch memory holds other rows' remains; the solo ones are new."""
    rows = data.draw(st.lists(row_strategy, min_size=1, max_size=7))
    order = data.draw(st.permutations(range(len(rows))))
    logits = [logits_of(row, vocab_size) for row in rows]
    states = [
        make_row(
            row["params"], row=i, seed=row["seed"], prompt=row["prompt"], output=row["output"],
            eos=row["eos"],
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
    alone = [
        run(Sampler(vocab_size), [x], [state])[0] for x, state in zip(logits, states, strict=True)
    ]
    sampler = Sampler(vocab_size)
    assert run(sampler, logits, states) == alone
    shuffled = run(sampler, [logits[i] for i in order], [states[i] for i in order])
    assert shuffled == [alone[i] for i in order]


@pytest.mark.parametrize("offset", range(0, 17))
def test_the_address_of_a_row_does_not_matter(offset: int) -> None:
    """Vector code that peels to an aligned address would round sums in another order."""
    vocab_size = 40_001
    rng = np.random.default_rng(12)
    values = (rng.standard_normal(vocab_size) * 3).astype(np.float32)
    results = set()
    for start in (0, offset):
        memory = np.zeros(vocab_size + 32, np.float32)
        memory[start : start + vocab_size] = values
        logits = memory[start : start + vocab_size].reshape(1, -1)
        state = make_row(SamplingParams(logprobs=20, top_p=0.9, presence_penalty=1.0), seed=offset)
        results.add(bits_of(Sampler(vocab_size).sample(logits, [state])[0]))
    assert len(results) == 1
