"""What the laws run on: each backend, a tiny model, and an engine in which nothing disturbs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from beds.backends import TEST_BACKENDS
from beds.tiny_files import write_tiny_gguf
from beds.whole_answers import roomy
from octavo import LLM


@pytest.fixture(scope="module", params=TEST_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("laws") / "tiny.gguf"))


@pytest.fixture(scope="module")
def lone(model: str, backend: str) -> Iterator[LLM]:
    """For answers to compare with."""
    llm = roomy(model, backend)
    yield llm
    llm.close()
