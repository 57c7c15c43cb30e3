"""Requests whose own fields bar every token: the caller's doing, so never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beds.live_server import AppClient, sse_events
from beds.tiny_files import write_tiny_gguf
from octavo.engine.async_llm import AsyncLLM

CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "regex": {"structured_outputs": {"regex": "zzz"}, "allowed_token_ids": [5]},
    "choice": {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]},
}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[AsyncLLM]:
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    made = AsyncLLM(str(path), backend=request.param, num_kv_blocks=64)
    yield made
    made.shutdown(timeout=5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", CONTRADICTIONS)
def test_a_contradiction_is_the_callers_own_fault(
    engine: AsyncLLM, which: str, stream: bool
) -> None:
    """C71: a 400 that no client sends again as it is; an event of that type where text has left,
    as the choice's "ye" has."""
    client = AppClient(engine)  # type: ignore[arg-type]
    response = client.complete(prompt="a", stream=stream, **CONTRADICTIONS[which])
    assert response.status_code == (200 if stream and which == "choice" else 400)
    last = sse_events(response.text)[-1] if response.status_code == 200 else response.json()
    assert (last["error"]["type"], last["error"]["code"]) == ("BadRequestError", 400)
    assert "no token is left" in last["error"]["message"]
    assert client.complete(prompt="a", max_tokens=2).status_code == 200


def test_logits_that_are_no_numbers_stay_our_own_fault(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C37: also under a grammar, and beside a bar."""
    sampler: Any = engine._engine.core.executor._runner.sampler  # type: ignore[attr-defined]
    sample = sampler.sample

    def broken(logits: Any, rows: Any, best: Any) -> Any:
        return sample(np.full_like(logits, np.nan), rows, np.full_like(best, -1))

    monkeypatch.setattr(sampler, "sample", broken)
    client = AppClient(engine)  # type: ignore[arg-type]
    for body in ({}, *CONTRADICTIONS.values()):
        response = client.complete(prompt="a", **body)
        assert response.status_code == 500
        assert "NaN" in response.text
