"""The engine replaced by a script, so that the command line is tested alone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from beds import fake_llm


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[fake_llm.FakeLLM]:
    """FakeLLM in place of octavo.engine.llm.LLM; set `.script` on it."""
    fake_llm.made.clear()
    monkeypatch.setattr(fake_llm.FakeLLM, "script", ["Par", "is", "."], raising=False)
    module: Any = ModuleType("octavo.engine.llm")
    module.LLM = fake_llm.FakeLLM
    monkeypatch.setitem(sys.modules, "octavo.engine.llm", module)
    return fake_llm.FakeLLM
