"""The law of the room: a row's result depends on that row alone, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.sampler_rows import make_row
from octavo.grammar_spec import GrammarSpec
from octavo.kernels.cpu import available_levels, make_kernels
from octavo.messages import RowFault, SampledToken
from octavo.sampling.constraints import keep_masked
from octavo.sampling.native import make_sampler
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import RowState
from octavo.sampling.truncation import min_p_floor, truncate
from octavo.sampling_params import SamplingParams


def maybe(values: st.SearchStrategy[Any], default: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(default), values)


token_ids = st.integers(0, 70)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0, 100.0]),
    top_p=maybe(st.floats(0.01, 0.9999), 1.0),
    top_k=maybe(st.integers(1, 80) | st.sampled_from([700, 5000]), 0),
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
    logits_processors=maybe(
        st.sampled_from(
            [{"dry": {}}, {"xtc": {"threshold": 0.01}}, {"typical": {"p": 0.7}, "dry": {}}]
        ),
        (),
    ),
    grammar=maybe(st.just(GrammarSpec.regex("a")), None),
)
row_strategy = st.fixed_dictionaries(
    {
        "params": params_strategy,
        "seed": st.integers(0, 2**64 - 1),
        "prompt": st.lists(token_ids, min_size=1, max_size=5),
        "output": st.lists(token_ids, max_size=4),
        "eos": st.lists(token_ids, max_size=2),
        "logits_seed": st.integers(0, 2**32 - 1),
        "masked": st.sampled_from([0.0, 0.5, 0.99, 1.0]),
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


def state_of(row: dict[str, Any], vocab_size: int, index: int = 0) -> RowState:
    """The row's state, with the mask of its grammar for one step."""
    history = {name: row[name] for name in ("seed", "prompt", "output", "eos")}
    state = make_row(row["params"], row=index, **history)
    if row["params"].grammar is not None:
        allowed = np.random.default_rng(row["logits_seed"]).random(vocab_size) >= row["masked"]
        state.mask = np.packbits(allowed, bitorder="little").tobytes()
    return state


def bits_of(result: SampledToken | RowFault) -> str:
    """A result as text with every bit of its floats."""
    if isinstance(result, RowFault):
        return repr(result)
    if result.logprobs is None:
        return f"{result.row} {result.token_id}"
    logprob, rank, top, named = result.logprobs
    alternatives = [(i, x.hex()) for i, x in (*top, *named)]
    return f"{result.row} {result.token_id} {logprob.hex()} {rank} {alternatives}"


LEVELS = ["numpy", *available_levels()]


def make_sampler_at(level: str, vocab_size: int) -> Sampler:
    """The numpy sampler, or that of an instruction-set level of the cpu backend."""
    if level == "numpy":
        return Sampler(vocab_size)
    return make_sampler(vocab_size, make_kernels(threads=2, isa=level).sampling)


def run(sampler: Sampler, logits: list[np.ndarray], states: list[RowState]) -> list[str]:
    return [bits_of(result) for result in sampler.sample(np.stack(logits), states)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab_size", [1, 7, 71, 4099, 40_001])
@settings(max_examples=20)
@given(data=st.data())
def test_any_batch_in_any_order_equals_each_row_alone(
    vocab_size: int, level: str, data: st.DataObject
) -> None:
    """R72, R83, C29: all features at once; odd sizes put rows at every alignment. The batch's
    sampler is reused, so its scratch memory holds other rows' remains; the solo ones are new."""
    rows = data.draw(st.lists(row_strategy, min_size=1, max_size=7))
    order = data.draw(st.permutations(range(len(rows))))
    logits = [logits_of(row, vocab_size) for row in rows]

    def states() -> list[RowState]:
        return [state_of(row, vocab_size, i) for i, row in enumerate(rows)]

    alone = [
        run(make_sampler_at(level, vocab_size), [x], [state])[0]
        for x, state in zip(logits, states(), strict=True)
    ]
    sampler = make_sampler_at(level, vocab_size)
    assert run(sampler, logits, states()) == alone
    shuffled = run(sampler, [logits[i] for i in order], [states()[i] for i in order])
    assert shuffled == [alone[i] for i in order]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("offset", range(0, 17))
def test_the_address_of_a_row_does_not_matter(offset: int, level: str) -> None:
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
        results.add(bits_of(make_sampler_at(level, vocab_size).sample(logits, [state])[0]))
    assert len(results) == 1


def assert_alike(native: SampledToken | RowFault, numpy: SampledToken | RowFault) -> None:
    """The same choice, ranks and order; log probabilities but for the order of a sum."""
    if isinstance(native, RowFault) or isinstance(numpy, RowFault) or numpy.logprobs is None:
        assert native == numpy
        return
    assert native.token_id == numpy.token_id
    assert native.logprobs is not None
    assert native.logprobs.rank == numpy.logprobs.rank
    for token_id, logprob in (*native.logprobs[2], *native.logprobs[3]):
        assert token_id != native.token_id or logprob == native.logprobs.logprob, "the same bits"
    for ours, theirs in zip(native.logprobs[2:], numpy.logprobs[2:], strict=True):
        assert [i for i, _ in ours] == [i for i, _ in theirs]
        assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], abs=1e-9)


@pytest.mark.parametrize("vocab_size", [1, 7, 71])
@settings(max_examples=100)
@given(row=row_strategy, greedy=st.booleans())
def test_a_row_that_takes_the_argmax_gets_no_other_token(
    vocab_size: int, greedy: bool, row: dict[str, Any]
) -> None:
    """R72: where a row says that no more is asked of its logits than their argmax, that is all that
    the sampler makes of them; and a greedy row of which nothing else is asked says so."""
    if greedy:
        row = {**row, "params": SamplingParams(temperature=0, top_p=0.5, seed=3)}
    logits, state = logits_of(row, vocab_size), state_of(row, vocab_size)
    assert state.takes_argmax or not greedy
    if state.takes_argmax:
        possible = np.where(np.isnan(logits), -np.inf, logits)
        (result,) = Sampler(vocab_size).sample(logits[None].copy(), [state])
        if possible.max() == -np.inf:
            assert isinstance(result, RowFault)
        else:
            assert result == SampledToken(state.row, int(possible.argmax()))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=20)
@given(rows=st.lists(row_strategy, min_size=1, max_size=7), data=st.data())
def test_tokens_that_the_head_found_are_taken_and_change_no_neighbour(
    level: str, rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    """R72: such rows have no logits; whatever lies there is not looked at."""
    vocab_size = 71
    found = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    logits = np.stack([logits_of(row, vocab_size) for row in rows])
    plain = run(
        make_sampler_at(level, vocab_size),
        list(logits),
        [state_of(row, vocab_size, i) for i, row in enumerate(rows)],
    )
    best = np.array([i if known else -1 for i, known in enumerate(found)], np.int32)
    logits[found] = math.nan
    states = [state_of(row, vocab_size, i) for i, row in enumerate(rows)]
    results = make_sampler_at(level, vocab_size).sample(logits, states, best)
    for i, (result, known) in enumerate(zip(results, found, strict=True)):
        assert bits_of(result) == (f"{i} {i}" if known else plain[i])


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("vocab_size", [1, 7, 71, 700, 4099, 40_001])
@settings(max_examples=25)
@given(row=row_strategy)
def test_native_chooses_as_numpy_does(vocab_size: int, level: str, row: dict[str, Any]) -> None:
    """R79-R82: the same noise, the same order, the same cuts, ties and infinities included."""
    logits = logits_of(row, vocab_size)
    results = [
        make_sampler_at(each, vocab_size).sample(logits[None].copy(), [state_of(row, vocab_size)])[
            0
        ]
        for each in (level, "numpy")
    ]
    assert_alike(*results)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_p": 0.999},
        {"top_k": 40, "top_p": 0.95},
        {"min_p": 0.02},
        {"min_p": 0.001, "top_p": 0.8},
        {"temperature": 5.0, "top_p": 0.97},
    ],
)
def test_native_draws_what_numpy_draws_a_thousand_times(level: str, params: Any) -> None:
    """R82: over many seeds and positions, on a row that looks like a model's."""
    vocab_size, count = 4099, 250
    logits = (np.random.default_rng(8).standard_normal(vocab_size) * 2.5).astype(np.float32)
    tokens = []
    for each in (level, "numpy"):
        rows = [make_row(SamplingParams(**params), row=i, seed=77 * i) for i in range(count)]
        found = make_sampler_at(each, vocab_size).sample(np.tile(logits, (count, 1)), rows)
        tokens.append([x.token_id for x in found if isinstance(x, SampledToken)])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 5


def kept_by(level: str, logits: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids that a level's truncation leaves of logits [V], as the row shows them afterwards."""
    kernels = make_kernels(threads=1, isa=level).sampling
    assert kernels is not None
    shown, out = logits[None].copy(), np.empty(1, np.int32)
    floor = min_p_floor(params.min_p) if params.min_p > 0 else -np.inf
    kernels.sample(
        shown, np.zeros(1, np.int32), np.array([params.temperature], np.float32),
        np.array([floor], np.float32), np.array([params.top_k], np.int32),
        np.array([params.top_p], np.float64), np.zeros(1, np.uint64), np.zeros(1, np.int64),
        np.ones(1, np.uint8), out,
    )  # fmt: skip
    assert shown[0, out[0]] > -np.inf
    return np.flatnonzero(shown[0] > -np.inf).tolist()


def scaled_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled: np.ndarray = (logits - logits.max()) / np.float32(temperature)
    return scaled


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 2.0, 4.0, 9.0])
def test_the_kernels_keep_exactly_what_numpy_keeps(level: str, spread: float) -> None:
    """R76, R79-R81: flat rows, peaked ones and ties by the thousand; each border there is."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(9001) * spread).astype(np.float32)
    for each in (logits, np.round(logits), np.round(logits * 4) / 4):
        for cuts in (
            {"top_p": 0.1}, {"top_p": 0.5}, {"top_p": 0.97}, {"top_p": 0.9999}, {"top_k": 1},
            {"top_k": 100}, {"top_k": 3000}, {"top_k": 9000}, {"min_p": 0.01}, {"min_p": 1.0},
            {"top_k": 700, "top_p": 0.8}, {"min_p": 1e-6, "top_k": 700, "top_p": 0.8},
        ):  # fmt: skip
            for temperature in (1.0, 0.3, 3.0):
                params = SamplingParams(temperature=temperature, **cuts)
                ids = truncate(scaled_of(each, temperature), params)
                assert ids is not None
                assert kept_by(level, each, params) == ids.tolist(), params


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_limit_next_to_a_token_is_seen_exactly(level: str) -> None:
    """R81: top_p a hair above and below what the tokens up to one weigh: closer than float32 sums
    of the others could tell."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal(4099) * 2.5).astype(np.float32)
        weights = np.sort(np.exp(scaled_of(logits, 1.0).astype(np.float64)))[::-1]
        sums = np.cumsum(weights) / weights.sum()
        for place in (0, 3, 20, 150, 900):
            for factor in (1 - 1e-9, 1 + 1e-9, 1 - 1e-6, 1 + 1e-6):
                params = SamplingParams(top_p=float(sums[place] * factor))
                ids = truncate(scaled_of(logits, 1.0), params)
                assert ids is not None
                assert ids.size == place + (1 if factor < 1 else 2)
                assert kept_by(level, logits, params) == ids.tolist()


@pytest.mark.parametrize("level", LEVELS[1:])
def test_values_that_scale_to_the_same_are_ties(level: str) -> None:
    """R79: logits that differ and scaled ones that don't (a high temperature): lower ids first."""
    rng = np.random.default_rng(5)
    near = (1000 + rng.integers(0, 400, 2051) * 2.0**-14).astype(np.float32)
    for temperature in (1.0, 60.0, 100.0):
        for top_p in (0.2, 0.5, 0.9):
            params = SamplingParams(temperature=temperature, top_p=top_p)
            ids = truncate(scaled_of(near, temperature), params)
            assert ids is not None
            assert kept_by(level, near, params) == ids.tolist()


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("vocab_size", [1, 7, 31, 32, 33, 71, 4099])
def test_a_mask_bars_the_same_tokens_in_kernels_and_numpy(level: str, vocab_size: int) -> None:
    """R69: 32 ids in a word; masks that end early or late; rows that are not meant stay."""
    kernels = make_kernels(threads=2, isa=level).sampling
    assert kernels is not None
    rng = np.random.default_rng(vocab_size)
    exact = -(-vocab_size // 8)
    for num_bytes in {exact, -(-vocab_size // 32) * 4, max(1, exact - 3), exact + 9}:
        for share in (0.0, 0.02, 0.5, 0.98, 1.0):
            masks = np.packbits(rng.random((3, 8 * num_bytes)) < share, axis=1, bitorder="little")
            logits = rng.standard_normal((5, vocab_size)).astype(np.float32)
            wanted, rows = logits.copy(), np.array([4, 0, 2], np.int32)
            for row, mask in zip(rows, masks, strict=True):
                keep_masked(wanted[row], mask.tobytes())
            kernels.mask(logits, rows, masks)
            np.testing.assert_array_equal(logits, wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_a_scored_prompt_row_has_the_bits_of_a_sampled_one(level: str) -> None:
    """C44: at each level: alone, in a batch, and as the logprobs of a sampled token."""
    vocab_size = 4099
    logits = (np.random.default_rng(9).standard_normal((5, vocab_size)) * 3).astype(np.float32)
    sampler = make_sampler_at(level, vocab_size)
    states = [make_row(SamplingParams(temperature=0, logprobs=4), row=i) for i in range(5)]
    sampled = sampler.sample(logits.copy(), states)
    assert all(isinstance(x, SampledToken) for x in sampled)
    ids = [x.token_id for x in sampled if isinstance(x, SampledToken)]
    scored = sampler.score(logits.copy(), ids, [4] * 5)
    assert scored == [x.logprobs for x in sampled if isinstance(x, SampledToken)]
    assert [sampler.score(logits[i : i + 1], ids[i : i + 1], [4])[0] for i in range(5)] == scored
