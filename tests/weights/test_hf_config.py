"""config.json: what is accepted means exactly what we compute; the rest is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from beds.tiny_files import tiny_config
from octavo.checkpoint import ModelConfig, RopeScaling
from octavo.errors import ModelLoadError
from octavo.weights.expected import check_config
from octavo.weights.hf_config import Settings, model_config


def read(**overrides: Any) -> ModelConfig:
    path = Path("folder/config.json")
    config = model_config(Settings(tiny_config(**overrides), path))
    check_config(config, path)
    return config


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA3_SCALING = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=128)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 8, "use_sliding_window": False},
        {"sliding_window": 512},
        {"layer_types": ["full_attention"] * 2},
        {"layer_types": ["full_attention"] * 2, "sliding_window": 8},
    ],
)
def test_a_window_that_is_not_in_use_is_full_attention(overrides: dict[str, Any]) -> None:
    """C88: the model is the same as one whose config never mentions a window."""
    assert read(**overrides) == read()


@pytest.mark.parametrize(
    "overrides",
    [
        {"sliding_window": 8},
        {"sliding_window": 8, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
    ],
)
def test_a_window_in_use_is_refused(overrides: dict[str, Any]) -> None:
    """C88: never ignored in silence."""
    with pytest.raises(ModelLoadError, match="sliding-window attention is not supported"):
        read(**overrides)


@pytest.mark.parametrize(
    ("overrides", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": None}, 10000.0, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            10000.0,
            RopeScaling(kind="linear", factor=2.0),
        ),
        ({"rope_scaling": LLAMA3}, 10000.0, LLAMA3_SCALING),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
            5e5,
            LLAMA3_SCALING,
        ),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, 7.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, 3.0, None),
    ],
)
def test_rotary_parameters_are_read_in_the_old_form_and_the_new(
    overrides: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    """rope_scaling with rope_theta beside it, or transformers 5's rope_parameters."""
    config = read(**overrides)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_optional_sizes_have_llamas_defaults() -> None:
    config = read(num_key_value_heads=None, head_dim=None, rms_norm_eps=None)
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert read(tie_word_embeddings=None).tie_word_embeddings is False


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3.*Llama family"),
    "another model type": ({"model_type": "mistral"}, "mistral.*Llama family"),
    "architectures as text": ({"architectures": "LlamaForCausalLM"}, "Llama family"),
    "attention bias": ({"attention_bias": True}, "attention_bias is True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is True"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "quantised weights": ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    "half-rotated heads": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "linear and llama3"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "linear and llama3"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "a factor of zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "at least 1"),
    "llama3 with equal bounds": (
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        "high_freq_factor",
    ),
    "two ropes": (
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
        "says something else",
    ),
    "ropes by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "differ by layer",
    ),
    "a missing size": ({"hidden_size": None}, "hidden_size is missing"),
    "a size as text": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "a size as a flag": ({"hidden_size": True}, "hidden_size is True"),
    "a negative size": ({"vocab_size": -1}, "vocab_size is -1"),
    "zero heads": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "heads that don't divide": ({"num_key_value_heads": 3}, "can't share 3"),
    "an odd head size": ({"head_dim": 15}, "head_dim is 15"),
    "a theta of zero": ({"rope_theta": 0.0}, "above zero"),
    "a theta without bounds": ({"rope_theta": 10**400}, "within reason"),
    "an endless epsilon": ({"rms_norm_eps": float("inf")}, "finite"),
    "layer types as text": ({"layer_types": "full"}, "layer_types is 'full'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_results_is_refused_by_name(case: str) -> None:
    overrides, says = REFUSED[case]
    with pytest.raises(ModelLoadError, match=says):
        read(**overrides)
