"""The composition root: errors of loading name the file and the way out."""

from __future__ import annotations

import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from beds.tiny_files import write_tiny_gguf, write_tiny_hf
from octavo.config import make_config
from octavo.engine.build import build_engine, make_scheduler
from octavo.errors import ConfigError, ModelLoadError
from octavo.weights import sources
from octavo.weights.fetch import WheelModel


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model whose weights are sound and whose tokenizer is not."""
    return write_tiny_gguf(
        tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.merges": ["no-space-here"]}
    )


def test_an_error_of_the_tokenizer_names_the_file(path: Path) -> None:
    with pytest.raises(ModelLoadError) as raised:
        build_engine(make_config(model=str(path), backend="reference"))
    assert str(raised.value).startswith(f"{path}: tokenizer.ggml.merges")
    assert "models fetch" not in str(raised.value)


def test_damage_found_while_loading_an_alias_says_how_to_repair_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = WheelModel("tiny", "tiny==1", "", 1, "tiny/tiny.gguf", "", path.stat().st_size)
    (path.parent / "models").mkdir()
    path.rename(path.parent / "models" / "tiny.gguf")
    monkeypatch.setenv("OCTAVO_CACHE", str(path.parent))
    monkeypatch.setitem(sources.ALIASES, "tiny", model)
    with pytest.raises(ModelLoadError, match=r"merges.*`octavo models fetch tiny`"):
        build_engine(make_config(model="tiny", backend="reference"))


def test_a_recording_is_its_owners_alone(tmp_path: Path) -> None:
    """Prompts are in it, as token ids."""
    record = tmp_path / "run.jsonl"
    settings = {"backend": "reference", "num_kv_blocks": 8, "max_model_len": 64}
    model = str(write_tiny_hf(tmp_path / "tiny"))
    build_engine(make_config(model=model, record=str(record), **settings)).core.close()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert record.read_text().startswith('["octavo",')


def test_a_list_of_blocks_that_the_system_refuses_is_a_settings_error() -> None:
    """A pool of them may be reserved where a list of their counts can't be made."""
    executor = Mock(num_kv_blocks=1 << 60, max_model_len=64, num_tier_slots=(0, 0))
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 1152921504606846976.*kv_cache_memory"):
        make_scheduler(make_config(), executor)
