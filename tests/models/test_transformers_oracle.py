"""Against transformers' LlamaForCausalLM, recorded once by tools/record_tiny_oracle.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from beds.backends import TEST_BACKENDS, kernels_of, logit_tolerance
from beds.dense_llama import dense_logits
from beds.steps import alone_and_whole
from beds.tiny_llama import VARIANTS, make_checkpoint, make_tensors
from octavo.models.registry import build_model

FIXTURE = Path(__file__).parent / "fixtures" / "tiny_transformers.npz"
RECORDED = ("tied", "untied", "linear_rope", "llama3_rope", "odd_sizes")


def recorded(variant: str) -> tuple[list[int], np.ndarray]:
    """Token ids of one sequence, and the logits of its last positions."""
    with np.load(FIXTURE) as arrays:
        return arrays[f"{variant}.token_ids"].tolist(), arrays[f"{variant}.logits"]


@pytest.mark.parametrize("backend", TEST_BACKENDS)
@pytest.mark.parametrize("variant", RECORDED)
def test_logits_equal_those_of_transformers(backend: str, variant: str) -> None:
    """R36-R40, R42, R43, R45, R48, R55-R59, R61, R66 in one sum, as another implementation has
    them, llama3 and linear rope scaling included."""
    kernels = kernels_of(backend)
    model = build_model(make_checkpoint(variant), kernels, max_model_len=256)
    token_ids, wanted = recorded(variant)
    logits = alone_and_whole(model, kernels, token_ids)[-len(wanted) :]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=logit_tolerance(kernels))


@pytest.mark.parametrize("variant", RECORDED)
def test_our_dense_definition_equals_transformers(variant: str) -> None:
    """The oracle of the other tests is itself measured (transformers' rope is float32)."""
    token_ids, wanted = recorded(variant)
    config = VARIANTS[variant]
    logits = dense_logits(config, make_tensors(config), token_ids)[-len(wanted) :]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)
