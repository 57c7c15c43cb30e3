"""Lists and texts without measure: refused with a short 400 that says how much is allowed, and what
is just allowed runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beds.live_server import AppClient
from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo.engine.async_llm import AsyncLLM

TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "stop strings": ({"stop": [f"s{i}" for i in range(5000)]}, "64"),
    "a stop string": ({"stop": ["x" * 5_000_000]}, "16384"),
    "characters of stop strings": ({"stop": ["x" * 300 + str(i) for i in range(60)]}, "16384"),
    "stop ids": ({"stop_token_ids": [5] * 5000}, "1024"),
    "biases": ({"logit_bias": {str(i): 1 for i in range(20_000)}}, "16384"),
    "allowed ids": ({"allowed_token_ids": [5] * 300_000}, "262144"),
    "bad words": ({"bad_words": [f"word{i}" for i in range(5000)]}, "256"),
    "a bad word": ({"bad_words": ["y" * 5_000_000]}, "1024"),
    "tokens of a bad word": ({"bad_words": ["%" * 1000]}, "64"),
    "named ids": ({"logprobs": 1, "logprob_token_ids": [5] * 5000}, "128"),
    "plug-ins": ({"logits_processors": {f"p{i}": {} for i in range(5000)}}, "8"),
}
JUST_ALLOWED: dict[str, dict[str, Any]] = {
    "stop strings": {"stop": [f"{i:256d}" for i in range(64)]},
    "stop ids": {"stop_token_ids": [3 + i % (VOCAB_SIZE - 3) for i in range(1024)]},
    "biases": {"logit_bias": {str(i): (-1) ** i for i in range(VOCAB_SIZE)}},
    "allowed ids": {"allowed_token_ids": [5 + i % 9 for i in range(2**18)]},
    "bad words": {"bad_words": [f"w{i}" for i in range(256)]},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppClient]:
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    engine = AsyncLLM(str(path), backend="reference", max_model_len=64, num_kv_blocks=16)
    yield AppClient(engine)  # type: ignore[arg-type]
    engine.shutdown(timeout=5)


@pytest.mark.parametrize("what", TOO_MUCH)
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_too_much_is_refused_with_the_limit(client: AppClient, what: str, route: str) -> None:
    """R69, C106: 400 with the field's name and the bound, in a few words whatever was sent."""
    body, limit = TOO_MUCH[what]
    if route == "chat":
        body = {**body, "logprobs": None, "top_logprobs": None}
    response = getattr(client, route)(max_tokens=2, **body)
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"]
    assert error["param"] in body
    assert limit in error["message"]
    assert len(response.text) < 700
    assert client.complete(prompt=[5, 6], max_tokens=1).status_code == 200


@pytest.mark.parametrize("what", JUST_ALLOWED)
def test_what_is_just_allowed_runs(client: AppClient, what: str) -> None:
    response = client.complete(prompt=[5, 6, 7], max_tokens=4, seed=1, **JUST_ALLOWED[what])
    assert response.status_code == 200, response.text[:300]
    assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
