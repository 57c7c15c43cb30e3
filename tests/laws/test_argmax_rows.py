"""Rows that take the head's argmax answer as they do when their logits are written and sampled.

The slow way is the same engine with every row asking for logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beds.backends import LAW_BACKENDS, backend_settings, cpu_levels
from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.grammar_spec import GrammarSpec
from octavo.worker import model_runner

ASKED: list[dict[str, Any]] = [
    {},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.2},
    {"logprobs": 0},
    {"logprobs": 4, "logprobs_mode": "processed"},
    {"prompt_logprobs": 1},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.8, "logprobs": 2},
    {"allowed_token_ids": [5, 9, 70, 71]},
    {"logit_bias": {40: 7.5}},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"min_tokens": 4, "stop_token_ids": list(range(3, VOCAB_SIZE, 2))},
    {"bad_words_token_ids": [(i,) for i in range(3, VOCAB_SIZE, 3)]},
    {"grammar": GrammarSpec.regex("[a-d]{9}")},
    {"logits_processors": {"dry": {"multiplier": 2.0, "allowed_length": 1}}},
]
"""What requests ask besides being greedy; the first two, and the scored prompt's, want no more
than the argmax of each token."""


def ways() -> list[tuple[str, dict[str, Any]]]:
    """(weight type of the file, settings of the engine)."""
    found: list[tuple[str, dict[str, Any]]] = [("F32", backend_settings(b)) for b in LAW_BACKENDS]
    for level in cpu_levels():
        for weight_type in ("F32", "Q8_0", "Q4_1"):
            quantization = None if weight_type == "F32" else "stored"
            found.append((weight_type, {"isa": level, "quantization": quantization}))
        found.append(("F32", {"isa": level, "quantization": "int8", "threads": 1}))
    return found


@contextmanager
def watched(steps: list[list[int]], *, all_logits: bool) -> Iterator[None]:
    """Notes argmax_only of each step that samples; with all_logits no row gets it."""
    with pytest.MonkeyPatch.context() as patch:
        plain = model_runner._argmax_only

        def argmax_only(states: Any) -> np.ndarray:
            only = plain(states)
            steps.append(only.tolist())
            return only * 0 if all_logits else only

        patch.setattr(model_runner, "_argmax_only", argmax_only)
        yield


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(x.outputs[0], x.prompt_logprobs) for x in outputs]


@pytest.mark.parametrize(
    "way", ways(), ids=lambda way: "-".join([way[0], *map(str, way[1].values())])
)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_rows_that_take_the_argmax_answer_as_with_logits(
    way: tuple[str, dict[str, Any]], enforce_eager: bool, tmp_path: Path
) -> None:
    """R72, R61: alone, and beside rows that are sampled, masked, penalised, scored, or want
    logprobs; tokens, text and logprobs."""
    weight_type, settings = way
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=weight_type))
    llm = LLM(model, max_model_len=128, enforce_eager=enforce_eager, max_num_seqs=32,
              enable_prefix_caching=False, num_kv_blocks=200, **settings)  # fmt: skip
    prompts = [[3 + (11 * i + 7 * j) % (VOCAB_SIZE - 3) for j in range(2 + i)] for i in range(15)]
    params = [
        SamplingParams(
            **{"temperature": 0, "max_tokens": 12, "seed": i, "ignore_eos": True, **each}
        )
        for i, each in enumerate(ASKED)
    ]
    steps: list[list[int]] = []
    slow_steps: list[list[int]] = []
    quick = answers(llm, prompts, params)
    with watched(steps, all_logits=False):
        assert answers(llm, prompts, params) == quick
        assert answers(llm, prompts[:1], params[:1]) == quick[:1]
    with watched(slow_steps, all_logits=True):
        assert answers(llm, prompts, params) == quick
    assert slow_steps == steps[: len(slow_steps)]
    assert any(0 < sum(only) < len(only) for only in steps), "no step of both kinds"
    assert [1] in steps
    assert sum(map(sum, slow_steps)) > 3 * 12, "three always, one after its min_tokens"
    llm.close()
