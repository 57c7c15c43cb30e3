"""A prefix cache that outlives the process: found again bit for bit, whole or not used at all."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from beds.backends import TEST_BACKENDS, backend_settings
from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.core.kept_prefixes import export
from octavo.errors import ConfigError
from octavo.worker import prefix_file

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, logprobs=2, ignore_eos=True)
PROMPTS = [[3 + (7 * i + 5 * j) % (VOCAB_SIZE - 3) for j in range(30 + 9 * i)] for i in range(4)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny_gguf(tmp_path / "tiny.gguf"))


def make(model: str, path: Path, backend: str = "reference", **settings: Any) -> LLM:
    settings = {"ram_tier_memory": 1 << 18, "num_kv_blocks": 40, "block_size": 8, **settings}
    return LLM(
        model,
        max_model_len=128,
        prefix_cache_file=str(path),
        **backend_settings(backend),
        **settings,
    )


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [
        (x.outputs[0].token_ids, [y.logprob for y in x.outputs[0].logprobs or ()])
        for x in llm.generate(prompts, PARAMS, use_tqdm=False)
    ]


def hits(llm: LLM) -> int:
    return llm.stats().prefix_hits_tokens


@pytest.mark.parametrize("backend", TEST_BACKENDS)
@pytest.mark.parametrize(
    "tiers", [{}, {"ram_tier_memory": 1 << 14, "file_tier_memory": 1 << 20, "num_kv_blocks": 12}]
)
def test_prefixes_are_found_by_the_next_process(
    model: str, backend: str, tiers: dict[str, int], tmp_path: Path
) -> None:
    """All but the last token of each prompt, and the same bits as computed afresh."""
    first = make(model, tmp_path / "kept", backend, **tiers)
    expected = answers(first)
    first.close()
    for _ in range(2):
        llm = make(model, tmp_path / "kept", backend, **tiers)
        assert answers(llm) == expected
        assert hits(llm) >= sum(len(prompt) // 8 * 8 - 8 for prompt in PROMPTS)
        llm._engine.core.scheduler.audit()
        llm.close()


def test_a_smaller_tier_takes_what_it_holds(model: str, tmp_path: Path) -> None:
    """The most recently used runs; never more than the budget."""
    first = make(model, tmp_path / "kept")
    expected = answers(first)
    first.close()
    block = 8 * 2 * 2 * 2 * 16 * 4
    for num_slots in (1, 3, 7):
        llm = make(model, tmp_path / "kept", ram_tier_memory=num_slots * block)
        assert llm._engine.core.scheduler.kv.slots.num_blocks == num_slots
        assert answers(llm) == expected
        llm._engine.core.scheduler.audit()
        llm._engine.core.executor.close()  # and the file stays as it is


def test_scopes_stay_apart_in_the_file(model: str, tmp_path: Path) -> None:
    """C94: what one scope computed is no hit of another, in the next process either."""
    first = make(model, tmp_path / "kept")
    for request in first._prepare(PROMPTS[0], PARAMS)[1]:
        request.cache_scope = "tenant"
        first._engine.core.add([request])
    while first._engine.core.has_unfinished():
        first._engine.core.step()
    first.close()
    llm = make(model, tmp_path / "kept")
    assert {run.scope for run in llm._engine.core.scheduler.kv.export_prefixes()} == {"tenant"}
    answers(llm, [PROMPTS[0]])
    assert hits(llm) == 0


@pytest.mark.parametrize("how", ["cut off", "a bit of a block"])
def test_a_damaged_file_is_refused_with_a_line(
    model: str, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Never trusted, never an end of the engine; and the next close replaces it."""
    path = tmp_path / "kept"
    first = make(model, path)
    expected = answers(first)
    first.close()
    data = bytearray(path.read_bytes())
    if how == "cut off":
        del data[-5:]
    else:
        data[prefix_file.HEAD_SIZE + 100] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "octavo"):
        llm = make(model, path)
    assert f"{path} is not used" in caplog.text
    assert answers(llm) == expected
    assert hits(llm) == 0
    llm.close()
    llm = make(model, path)
    assert answers(llm) == expected
    assert hits(llm) > 0


def test_a_file_of_another_model_or_setting_is_refused(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fingerprint: model file, block size, number format."""
    path = tmp_path / "kept"
    first = make(model, path)
    answers(first)
    first.close()
    other = tmp_path / "other.gguf"
    other.write_bytes(Path(model).read_bytes() + b"\0")
    for name, changed in (
        (model, {"block_size": 4}),
        (model, {"backend": "cpu:float32"}),
        (str(other), {}),
    ):
        caplog.clear()
        llm = make(name, path, **changed)
        assert "another model, backend or version" in caplog.text
        llm._engine.core.executor.close()
    caplog.clear()
    make(model, path)
    assert "is not used" not in caplog.text


def test_a_model_that_was_replaced_meanwhile_is_another_model(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is kept is of the model that computed it, not of the one that has its path by then."""
    path = tmp_path / "kept"
    first = make(model, path)
    answers(first)
    os.replace(write_tiny_gguf(tmp_path / "new.gguf", seed=1), model)
    first.close()
    second = make(model, path)
    assert "another model" in caplog.text
    assert answers(second) == answers(make(model, tmp_path / "none"))
    assert hits(second) == 0


def test_a_write_that_fails_leaves_the_old_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in the log; what was kept before is still whole."""
    path = tmp_path / "kept"
    first = make(model, path)
    expected = answers(first)
    first.close()
    before = path.read_bytes()

    def fail(fd: int) -> None:
        raise OSError("no space left")

    llm = make(model, path)
    answers(llm, [list(reversed(PROMPTS[0]))])
    monkeypatch.setattr(prefix_file.os, "fsync", fail)
    llm.close()
    monkeypatch.undo()
    assert "not kept" in caplog.text
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.glob("kept*")] == ["kept"], "a full disk is still full"
    assert answers(make(model, path)) == expected


KILLED = """
import os, signal, sys
from octavo import LLM, SamplingParams
from octavo import durable
writes = int(sys.argv[3])
class Killer:
    def __init__(self, file): self.file, self.left = file, writes
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def __getattr__(self, name): return getattr(self.file, name)
    def writelines(self, pieces):
        for piece in pieces: self.write(piece)
    def write(self, data):
        self.left -= 1
        if self.left < 0:
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)
durable.open = lambda *a, **k: Killer(open(*a, **k)) if "w" in a[1] else open(*a, **k)
llm = LLM(sys.argv[1], backend="reference", max_model_len=128, num_kv_blocks=40, block_size=8,
          ram_tier_memory=1 << 18, prefix_cache_file=sys.argv[2])
llm.generate([[9] * 50], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
llm.close()
"""


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_killed_while_writing_the_old_file_is_whole(
    model: str, tmp_path: Path, writes: int
) -> None:
    """SIGKILL in the middle of the index or of a block: the file of before is what is found."""
    path = tmp_path / "kept"
    first = make(model, path)
    expected = answers(first)
    first.close()
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, model, str(path), str(writes)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    llm = make(model, path)
    assert answers(llm) == expected
    assert hits(llm) > 0
    llm.close()
    assert [p.name for p in tmp_path.iterdir() if "kept" in p.name] == ["kept"]


def test_a_prefix_file_needs_a_tier(model: str, tmp_path: Path) -> None:
    """It is read into one, and holds what the prefix cache has: mistakes are said at the start."""
    with pytest.raises(ConfigError, match="ram_tier_memory"):
        make(model, tmp_path / "kept", ram_tier_memory=0)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make(model, tmp_path / "kept", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="prefix_cache_file"):
        make(model, tmp_path / "missing" / "kept")
    with pytest.raises(ConfigError, match="prefix_cache_save_seconds"):
        make(model, tmp_path / "kept", prefix_cache_save_seconds=-1.0)
    with pytest.raises(ConfigError, match="prefix_cache_file"):
        LLM(model, ram_tier_memory=1 << 20, prefix_cache_file="")


def test_a_busy_engine_keeps_prefixes_from_time_to_time(model: str, tmp_path: Path) -> None:
    """As often as is asked for, and not when nothing has changed; with 0 only at the end."""
    path = tmp_path / "kept"
    llm = make(model, path, prefix_cache_save_seconds=0.0)
    answers(llm)
    assert not path.exists()
    llm.close()
    llm = make(model, path, prefix_cache_save_seconds=60.0)
    core, seconds = llm._engine.core, [0.0]
    core.now = core.prefixes._now = lambda: seconds[0]
    core.prefixes.due = 60.0
    first = path.stat().st_mtime_ns
    answers(llm)
    assert path.stat().st_mtime_ns == first
    seconds[0] = 61.0
    answers(llm, [list(reversed(PROMPTS[0]))])
    second = path.stat().st_mtime_ns
    assert second != first
    seconds[0] = 120.0
    answers(llm, [list(reversed(PROMPTS[1]))])
    assert path.stat().st_mtime_ns == second, "the next one is due 60 seconds after the last"
    core.prefixes.keep()
    third = path.stat().st_mtime_ns
    core.prefixes.keep()
    llm.close()
    assert path.stat().st_mtime_ns == third != second, "nothing had changed"


BUSY = """
import sys
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], backend="reference", max_model_len=128, num_kv_blocks=12, block_size=8,
          ram_tier_memory=1 << 15, file_tier_memory=1 << 18, prefix_cache_file=sys.argv[2],
          prefix_cache_save_seconds=1e-9)
params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
print("ready", flush=True)
for i in range(10**9):
    prompts = [[3 + (7 * (i + k) + 5 * j) % 40 for j in range(30 + 9 * k)] for k in range(4)]
    llm.generate(prompts, params, use_tqdm=False)
"""


def test_killed_at_any_moment_the_file_is_whole(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL while it serves and writes, again and again: each time the next process finds
    prefixes, and never a damaged file."""
    path = tmp_path / "kept"
    rng = random.Random(3)
    for _ in range(5):
        busy = subprocess.Popen(
            [sys.executable, "-c", BUSY, model, str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
        )
        assert busy.stdout is not None
        busy.stdout.readline()
        while not path.exists():
            time.sleep(0.01)
        time.sleep(rng.random())
        busy.kill()
        busy.wait()
        busy.stdout.close()
    llm = make(model, path)
    assert "not used" not in caplog.text
    runs = export(llm._engine.core.scheduler.kv.cache, max_blocks=1000)
    asked = [[*run.token_ids, 3] for run in runs if run.parent < 0][:2]
    expected = answers(make(model, tmp_path / "other"), asked)
    assert answers(llm, asked) == expected
    assert hits(llm) == sum(len(prompt) - 1 for prompt in asked) > 0


def test_of_two_processes_with_one_file_the_last_to_write_wins(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither disturbs the other, and the file is whole."""
    path = tmp_path / "kept"
    first, second = make(model, path), make(model, path)
    expected = answers(first)
    answers(second, PROMPTS[:1])
    second.close()
    first.close()
    llm = make(model, path)
    assert answers(llm) == expected
    assert hits(llm) >= sum(len(prompt) // 8 * 8 - 8 for prompt in PROMPTS)
    assert not caplog.records
