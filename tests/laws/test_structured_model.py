"""Structured output on SmolLM2 itself: the real sampler and vocabulary under real masks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import LLM, SamplingParams
from octavo.grammar_spec import GrammarSpec

pytestmark = [pytest.mark.model, pytest.mark.slow]

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "population", "capital"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe Paris as JSON."}]


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    model = LLM(str(model_file), max_model_len=1024, num_kv_blocks=64, threads=2)
    yield model
    model.close()


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_of_a_real_model_keep_their_schema(llm: LLM, temperature: float) -> None:
    """C70: greedy and wild, eight at once in a pool that is too small for them all."""
    params = SamplingParams(
        grammar=GrammarSpec.json(CITY), n=8, temperature=temperature, seed=1, max_tokens=200
    )
    (output,) = llm.chat([QUESTION], params)
    for answer in output.outputs:
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), CITY)


def test_a_label_is_one_of_the_labels(llm: LLM) -> None:
    """R70: and raw log probabilities are those of the model, whatever the mask."""
    labels = ["positive", "negative", "neutral"]
    prompt = "Sentence: I love it. Sentiment:"
    params = SamplingParams(grammar=GrammarSpec.choice(labels), temperature=0, logprobs=2)
    free = SamplingParams(temperature=0, logprobs=2, max_tokens=1)
    held, loose = (o.outputs[0] for o in llm.generate([prompt, prompt], [params, free]))
    assert held.text in labels
    assert held.logprobs is not None
    assert loose.logprobs is not None
    assert held.logprobs[0].top[0].logprob == loose.logprobs[0].top[0].logprob
