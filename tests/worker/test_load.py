"""From settings and a checkpoint to an executor that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from beds.backends import TEST_BACKENDS, backend_settings
from beds.tiny_llama import TIED, make_checkpoint
from octavo.config import make_config
from octavo.errors import ConfigError, ModelLoadError
from octavo.messages import NewRequest, ScheduledRequest, SchedulerOutput
from octavo.sampling_params import SamplingParams
from octavo.worker.load import load_executor, resolve_max_model_len


@pytest.mark.parametrize("backend", TEST_BACKENDS)
def test_a_loaded_executor_answers(backend: str) -> None:
    config = make_config(
        **backend_settings(backend), num_kv_blocks=10, max_num_seqs=2, max_model_len=100
    )
    executor = load_executor(config, make_checkpoint("tied"))
    assert (executor.num_kv_blocks, executor.max_model_len, executor.vocab_size) == (10, 100, 96)
    greedy = SamplingParams(temperature=0)
    start = NewRequest(1, 7, (3, 4, 5), 3, greedy, 0, (0,))
    plan = SchedulerOutput(1, (start,), (ScheduledRequest(1, 0, 3, True, (4,)),), 3)
    result = executor.collect(executor.submit(plan))
    assert result.faults == ()
    assert [token.row for token in result.sampled] == [1]
    again = load_executor(config, make_checkpoint("tied"))
    assert again.collect(again.submit(plan)).sampled == result.sampled


@pytest.mark.parametrize("backend", TEST_BACKENDS)
def test_the_report_says_what_runs_and_what_it_takes(backend: str) -> None:
    """R41, R60, R119: sizes of weights, pool and rotary cache, and the shape of the model."""
    config = make_config(**backend_settings(backend), num_kv_blocks=10)
    report = load_executor(config, make_checkpoint("tied")).describe()
    assert report["backend"] == backend_settings(backend)["backend"]
    assert {"isa", "threads", "dtype", "weights"} <= set(report)
    assert report["KV pool"].startswith("10 blocks of 16 = 160 tokens")
    assert report["rotary cache"] == "256 positions, 0.0 MiB"
    assert report["shape"] == ("2 layers, hidden 64, 4 heads, 2 K/V heads, MLP 160 = 2.50 x hidden")


def test_max_model_len_defaults_to_what_the_model_was_trained_for() -> None:
    checkpoint = make_checkpoint("tied")
    assert resolve_max_model_len(make_config(), checkpoint) == 256
    assert resolve_max_model_len(make_config(max_model_len=256), checkpoint) == 256
    assert resolve_max_model_len(make_config(max_model_len=17), checkpoint) == 17
    with pytest.raises(ConfigError, match=r"max_model_len is 257.*at most 256.*tiny-llama"):
        resolve_max_model_len(make_config(max_model_len=257), checkpoint)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"threads": 4}, "threads is 4"),
        ({"isa": "avx2"}, "isa is 'avx2'"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype is 'bfloat16'"),
        ({"kv_cache_memory": 10}, "kv_cache_memory is 10"),
        ({"max_num_seqs": 10**12}, r"max_num_seqs is 1000000000000, .*smaller.*256 tokens"),
    ],
)
def test_settings_that_can_not_be_honoured_are_refused(
    settings: dict[str, object], text: str
) -> None:
    """Before any weight is read."""
    checkpoint = make_checkpoint("tied")
    with pytest.raises(ConfigError, match=text):
        load_executor(make_config(backend="reference", **settings), checkpoint)
    assert checkpoint.weights.loaded == []  # type: ignore[attr-defined]


def test_an_unknown_architecture_is_refused() -> None:
    checkpoint = make_checkpoint(replace(TIED, architecture="rwkv"))
    with pytest.raises(ModelLoadError, match="rwkv"):
        load_executor(make_config(backend="reference", num_kv_blocks=4), checkpoint)
