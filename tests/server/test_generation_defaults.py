"""Who decides a sampling parameter that several name: the user, the server, the model, OpenAI."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beds.fake_engine import FakeEngine
from beds.live_server import AppClient
from beds.tiny_files import write_tiny_hf
from octavo import LLM
from octavo.config import make_config
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

MODEL: dict[str, Any] = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.02, "repetition_penalty": 1.1,
}  # fmt: skip
SERVER: dict[str, Any] = {
    "temperature": 0.4, "top_p": 0.8, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2,
    "presence_penalty": 0.3, "frequency_penalty": 0.2,
}  # fmt: skip
USER: dict[str, Any] = {
    "temperature": 0.2, "top_p": 0.7, "top_k": 30, "min_p": 0.1, "repetition_penalty": 1.3,
    "presence_penalty": 0.5, "frequency_penalty": 0.4,
}  # fmt: skip
OPENAI = {name: getattr(SamplingParams(), name) for name in SERVER}
FAST: dict[str, Any] = {"backend": "reference", "max_model_len": 64, "num_kv_blocks": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = write_tiny_hf(tmp_path_factory.mktemp("model") / "tiny")
    settings = {"eos_token_id": 2, "do_sample": True, "max_length": 99, **MODEL, "top_k": 50.0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return str(folder)


def sampled_with(engine: AsyncLLM, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters that requests over HTTP reach the engine with."""
    found: list[dict[str, Any]] = []
    original = engine.submit

    def submit(prompt: Any, params: SamplingParams, **rest: Any) -> Any:
        found.append({name: getattr(params, name) for name in SERVER})
        return original(prompt, params, **rest)

    engine.submit = submit  # type: ignore[method-assign]
    client = AppClient(engine)  # type: ignore[arg-type]
    for body in bodies:
        response = client.complete(prompt=[5, 6], max_tokens=1, **body)
        assert response.status_code == 200, response.text
    return found


@pytest.mark.parametrize("server", [{}, SERVER, {"temperature": 0.4}], ids=["none", "all", "one"])
@pytest.mark.parametrize("generation_config", ["auto", "vllm"])
def test_user_over_server_over_model_over_openai(
    model: str, server: dict[str, Any], generation_config: str
) -> None:
    """Every field by itself and all together, over HTTP; null is the default, and a value that
    equals OpenAI's default is a value."""
    engine = AsyncLLM(
        model,
        generation_config=generation_config,
        override_generation_config=json.dumps(server) if server else None,
        **FAST,
    )
    unsaid = {**OPENAI, **(MODEL if generation_config == "auto" else {}), **server}
    bodies: list[dict[str, Any]] = [{}, USER, dict.fromkeys(SERVER), OPENAI]
    bodies += [{name: USER[name]} for name in SERVER]
    try:
        found = sampled_with(engine, bodies)
    finally:
        engine.shutdown(timeout=5)
    said = [{k: v for k, v in body.items() if v is not None} for body in bodies]
    assert found == [{**unsaid, **body} for body in said]


def test_python_callers_have_the_same_defaults(model: str) -> None:
    """LLM: no params at all are the defaults; SamplingParams of one's own are taken as they are."""
    llm = LLM(model, override_generation_config='{"top_k": 3, "temperature": 0}', **FAST)
    defaults = SamplingParams(**{**MODEL, "top_k": 3, "temperature": 0})
    assert llm.default_params() == defaults
    short = replace(defaults, max_tokens=9)
    said, unsaid = (llm.generate([[5, 6, 7]], p, use_tqdm=False) for p in (short, None))
    assert unsaid[0].outputs[0].token_ids[:9] == said[0].outputs[0].token_ids
    llm.close()
    plain = LLM(model, generation_config="vllm", **FAST)
    assert plain.default_params() == SamplingParams()
    plain.close()


def test_a_chat_has_the_same_defaults() -> None:
    """The other route, by the same rule."""
    engine = FakeEngine(sampling=dict(MODEL))
    client = AppClient(engine)
    for body in ({}, {"temperature": 0.2}, {"temperature": None, "top_k": 0}):
        assert client.chat(max_tokens=1, **body).status_code == 200
    found = [{name: getattr(job.params, name) for name in SERVER} for job in engine.submitted]
    unsaid = {**OPENAI, **MODEL}
    assert found == [unsaid, {**unsaid, "temperature": 0.2}, {**unsaid, "top_k": 0}]


@pytest.mark.parametrize(
    "text",
    ["", "{", "3", "[]", '["top_p"]', '{"max_tokens": 3}', '{"top_k": 1.5}', '{"top_p": 0}',
     '{"temperature": null}', '{"temperature": NaN}', '"temperature"'],
)  # fmt: skip
def test_overrides_that_are_none_are_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="override_generation_config"):
        make_config(override_generation_config=text)


def test_only_two_sources_are_known() -> None:
    with pytest.raises(ConfigError, match="generation_config"):
        make_config(generation_config="none")
