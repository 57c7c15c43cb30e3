"""Record the logits of transformers' LlamaForCausalLM on the tiny random Llamas of the tests.

    PYTHONPATH=src:tests python tools/record_tiny_oracle.py

in an environment that has torch and transformers (development only). Writes
tests/models/fixtures/tiny_transformers.npz; the tests compare with it and need neither.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from beds.tiny_llama import VARIANTS, make_tensors
from octavo.checkpoint import ModelConfig

FIXTURE = Path(__file__).parents[1] / "tests/models/fixtures/tiny_transformers.npz"
NUM_TOKENS = 80
NUM_RECORDED = 8
"""Last positions whose logits are kept: far enough for every rope to matter."""


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for variant, config in VARIANTS.items():
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "factors":
            continue  # Hugging Face has no plain form of a GGUF's factors
        token_ids = np.random.default_rng(5).integers(0, config.vocab_size, NUM_TOKENS)
        logits = transformers_logits(config, make_tensors(config), token_ids)
        arrays[f"{variant}.token_ids"] = token_ids.astype(np.int32)
        arrays[f"{variant}.logits"] = logits[-NUM_RECORDED:].astype(np.float32)
    np.savez_compressed(FIXTURE, **arrays)
    print(f"{FIXTURE}: {FIXTURE.stat().st_size:,} bytes, transformers {transformers.__version__}")


def transformers_logits(
    config: ModelConfig, tensors: dict[str, np.ndarray], token_ids: np.ndarray
) -> np.ndarray:
    """Logits [T, V] of one sequence in float64, so that only the definition is recorded."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        rope["low_freq_factor"] = scaling.low_freq_factor
        rope["high_freq_factor"] = scaling.high_freq_factor
        rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_word_embeddings,
            attn_implementation="eager",
        )
    )
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        output = model.double().eval()(torch.from_numpy(token_ids)[None])
    logits: np.ndarray = output.logits[0].numpy()
    return logits


if __name__ == "__main__":
    main()
