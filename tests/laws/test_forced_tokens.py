"""Jump-forward on real backends: the same bits as sampling token by token, however it is cut.

The undisturbed twin samples each request alone, without jumps; the other engine takes all of them
together, appends what the grammars force, and is short of everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.backends import LAW_BACKENDS, backend_settings, kernels_of
from beds.tiny_files import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.grammar_spec import GrammarSpec
from octavo.outputs import CompletionOutput

TOKEN_IDS = st.integers(3, VOCAB_SIZE - 1)
FORMS = [
    GrammarSpec.json(
        {
            "properties": {"the label": {"enum": ["in the end", "in there", 7]}},
            "required": ["the label"],
            "additionalProperties": False,
        }
    ),
    GrammarSpec.regex("([a-h]the other){3,6}[ab]in the end"),
    GrammarSpec.choice(["a", "in the town", "in the tower", "of"]),
    None,
]
SQUEEZED: dict[str, Any] = {"num_kv_blocks": 34, "block_size": 4, "max_num_batched_tokens": 9}
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_kv_blocks": 64},
    "squeezed": SQUEEZED,
    "one token a step": {**SQUEEZED, "max_num_batched_tokens": 1, "enable_prefix_caching": False},
    "eager": {**SQUEEZED, "enforce_eager": True, "prune_last_layer": False},
    "swap": {**SQUEEZED, "preemption_mode": "swap", "ram_tier_memory": 512},
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    prompt = draw(st.lists(TOKEN_IDS, min_size=1, max_size=40))
    return prompt, SamplingParams(
        grammar=draw(st.sampled_from(FORMS)),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=draw(st.sampled_from([3, 30, 60])),
        logprobs=draw(st.sampled_from([None, None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        n=draw(st.sampled_from([1, 1, 3])),
    )


def bits(answer: CompletionOutput) -> tuple[Any, ...]:
    logprobs = [
        (x.token_id, x.logprob, x.rank, tuple((y.token_id, y.logprob) for y in x.top))
        for x in answer.logprobs or ()
    ]
    counted = answer.num_generated_tokens
    return (
        answer.token_ids,
        answer.text,
        answer.finish_reason,
        answer.stop_reason,
        logprobs,
        counted,
    )


@pytest.fixture(scope="module", params=LAW_BACKENDS)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, LLM]]:
    model = str(write_tiny_gguf(Path(tmp_path_factory.mktemp("laws")) / "tiny.gguf"))
    nbytes = kernels_of(request.param).kv_bytes_per_token(
        num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM
    )
    made = {
        "alone": LLM(
            model,
            max_model_len=128,
            num_kv_blocks=64,
            jump_forward=False,
            enable_prefix_caching=False,
            **backend_settings(request.param),
        )
    }
    for name, given_settings in SETTINGS.items():
        own = {**given_settings, **backend_settings(request.param)}
        own["ram_tier_memory"] = own.get("ram_tier_memory", 0) * nbytes
        made[name] = LLM(model, max_model_len=128, **own)
    yield made
    for llm in made.values():
        llm.close()


@pytest.mark.parametrize("name", SETTINGS)
@given(workload=st.lists(requests(), min_size=1, max_size=6))
@settings(max_examples=8)
def test_jumps_never_move_a_bit(
    engines: dict[str, LLM], name: str, workload: list[tuple[list[int], SamplingParams]]
) -> None:
    """Ids, text, ends, counts and log probabilities; rows without a form go on beside them."""
    llm, alone = engines[name], engines["alone"]
    prompts, params = [prompt for prompt, _ in workload], [p for _, p in workload]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, own, output in zip(prompts, params, together, strict=True):
        (twin,) = alone.generate([prompt], own, use_tqdm=False)
        assert [bits(x) for x in output.outputs] == [bits(x) for x in twin.outputs]
        assert output.prompt_logprobs == twin.prompt_logprobs


def test_what_follows_a_run_is_drawn_as_ever(engines: dict[str, LLM]) -> None:
    """Noise goes by the position, and penalties count what was forced: b and d, but not c."""
    params = [
        SamplingParams(
            grammar=GrammarSpec.regex("x(d,b;d,b;[c-e]){5}[b-d]{6}") if seed % 2 else FORMS[1],
            seed=seed,
            temperature=1.3,
            frequency_penalty=0.5,
            max_tokens=90,
        )
        for seed in range(8)
    ]
    answers = {
        name: [bits(x.outputs[0]) for x in engines[name].generate([[5, 6, 7]] * 8, params)]
        for name in ("alone", "roomy")
    }
    assert answers["roomy"] == answers["alone"]
    assert len({answer[1] for answer in answers["roomy"]}) > 4


def test_a_forced_run_is_one_step(engines: dict[str, LLM]) -> None:
    """The token before it, all of it, and the choice that follows: computed together."""
    spec = GrammarSpec.regex("[ab](the other ){2}[ab]in the end")
    params = SamplingParams(grammar=spec, seed=1, temperature=1, max_tokens=60)
    steps: dict[str, int] = {}
    for name in ("alone", "roomy"):
        before = engines[name].stats().steps
        (output,) = engines[name].generate([[5, 6, 7]], params, use_tqdm=False)
        steps[name] = engines[name].stats().steps - before
    assert steps["alone"] == output.outputs[0].num_generated_tokens > 15
    assert steps["roomy"] <= 3, "where a run ends, its last token may be part of a longer one"
