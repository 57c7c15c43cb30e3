"""The floors of benchmarks/end_to_end.py, against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from beds.backends import cpu_levels
from octavo.checkpoint import ModelConfig, StoredRows
from octavo.kernels.cpu import make_kernels

LAYERS = 2 * (8 * 16 + 8 * 8 + 8 * 24 + 12 * 8)
HEAD = 8 * 10
PER_KEY = 4 * 2 * 4 * 2


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("end_to_end")


def test_a_decode_step_costs_the_larger_of_work_and_bytes(
    bench: ModuleType, toy: ModelConfig
) -> None:
    cost = bench.costs_of(toy, 1000)
    assert cost == (LAYERS, HEAD, PER_KEY, 2 * 2 * 2 * 2 * 2, 1000)
    load = bench.Load([bench.Asked([0] * 5, 3), bench.Asked([0] * 2, 2)], "output")
    # Step 1: both, 6 and 3 keys; step 2: the first alone, 7 keys.
    bytes_bound = (1000 + 32 * 9) + (1000 + 32 * 7)
    assert bench.decode_floor(load, cost, bench.Speed(1e30, 1.0)) == pytest.approx(bytes_bound)
    flops_bound = 2 * (LAYERS + HEAD) * 3 + PER_KEY * 16
    assert bench.decode_floor(load, cost, bench.Speed(1.0, 1e30)) == pytest.approx(flops_bound)


def test_a_shared_prefix_is_computed_once(bench: ModuleType, toy: ModelConfig) -> None:
    cost = bench.costs_of(toy, 0)
    load = bench.Load([bench.Asked([0] * 5, 1), bench.Asked([0] * 6, 1)], "output", shared=4)
    # 5 tokens of 1 to 5 keys, then two of 5 and 6.
    flops = 2 * LAYERS * 7 + 2 * 2 * HEAD + PER_KEY * (15 + 11)
    assert bench.prompt_floor(load, cost, bench.Speed(1.0, 1.0)) == pytest.approx(flops)


def test_rates_count_the_tokens_that_the_table_says(bench: ModuleType, toy: ModelConfig) -> None:
    cost, speed = bench.costs_of(toy, 1000), bench.Speed(1e30, 1.0)
    one = bench.Load([bench.Asked([0] * 4, 3)], "later")
    assert bench.floor_rate(one, cost, speed) == pytest.approx(2 / (2 * 1000 + 32 * (5 + 6)))
    prompt = one._replace(counts="prompt")
    assert bench.floor_rate(prompt, cost, speed) == pytest.approx(4 / 1000)
    whole = one._replace(counts="output")
    assert bench.floor_rate(whole, cost, speed) == pytest.approx(3 / (1000 + 2000 + 32 * 11))


def test_loads_are_new_in_each_repeat_and_the_same_in_each_run(bench: ModuleType) -> None:
    assert bench.make_load("mixed", 1) == bench.make_load("mixed", 1)
    assert bench.make_load("mixed", 1) != bench.make_load("mixed", 2)
    prompts = [asked.prompt for asked in bench.make_load("shared", 0).requests]
    assert len({tuple(prompt[:1000]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 48


@pytest.mark.parametrize("level", cpu_levels())
def test_bf16_is_bfloat16_whatever_a_level_keeps_by_default(bench: ModuleType, level: str) -> None:
    rows = StoredRows("Q8_0", np.zeros((32, 8 * 34), np.uint8))
    nbytes = {}
    for name in ("bf16", "int8", "stored"):
        weight = make_kernels(isa=level, **bench.FORMS[name]).pack_stored([rows], 256)
        assert weight is not None
        nbytes[name] = weight.nbytes
    assert nbytes["bf16"] == 32 * 256 * 2
    assert max(nbytes["int8"], nbytes["stored"]) < nbytes["bf16"]


def test_no_load_begins_as_another(bench: ModuleType) -> None:
    """Else a kept prefix would stand for a prompt that is to be computed."""
    names = ("mixed", "shared", "alone", "one", "prefill", "long")
    begins = [
        {tuple(asked.prompt[:16]) for asked in bench.make_load(name, seed).requests}
        for name in names
        for seed in range(4)
    ]
    assert len(set.union(*begins)) == sum(len(each) for each in begins)
