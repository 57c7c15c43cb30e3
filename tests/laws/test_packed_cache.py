"""Packed weights that outlive the process: the same bits as packing, whole or not used at all."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from beds.backends import TEST_BACKENDS
from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf, write_tiny_hf
from octavo import LLM, SamplingParams
from octavo.cli.main import main

if not any(name.startswith("cpu") for name in TEST_BACKENDS):
    pytest.skip("no cpu backend is asked for", allow_module_level=True)

from octavo.kernels.cpu import CpuKernels, available_levels, packed

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, logprobs=2, ignore_eos=True)
PROMPTS = [[3 + (7 * i + 5 * j) % (VOCAB_SIZE - 3) for j in range(30 + 9 * i)] for i in range(3)]
FORMATS: list[dict[str, Any]] = [
    {},
    {"dtype": "float32"},
    {"quantization": "int8"},
    {"quantization": "stored"},
]
ONE_START = """
import sys
from octavo import LLM, SamplingParams
from octavo.kernels.cpu import packed
packed.MIN_BYTES = 0
{before}
llm = LLM(sys.argv[1], num_kv_blocks=40, max_model_len=128)
outputs = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
print(outputs[0].outputs[0].token_ids)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that takes models of any size."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "MIN_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q8_0")


def start(model: Path, **settings: Any) -> list[Any]:
    """Load, answer, and wait until the cache is written: token ids and their logprobs."""
    llm = LLM(str(model), num_kv_blocks=40, max_model_len=128, **settings)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    packed.wait()
    return [
        (x.outputs[0].token_ids, [y.logprob for y in x.outputs[0].logprobs or ()]) for x in outputs
    ]


def start_apart(model: Path, before: str = "") -> subprocess.Popen[str]:
    """A start in a process of its own."""
    command = [sys.executable, "-c", ONE_START.format(before=before), str(model)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def kept(cache: Path) -> Path:
    [path] = cache.iterdir()
    return path


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("a weight was packed")

    monkeypatch.setattr(CpuKernels, "pack_linear", fail)
    monkeypatch.setattr(CpuKernels, "pack_stored", fail)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "octavo")
    return caplog


@pytest.mark.parametrize("settings", FORMATS)
@pytest.mark.parametrize("way", ["auto", "map", "copy"])
@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_weights_from_the_cache_are_the_packed_ones_to_the_bit(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
    *,
    settings: dict[str, Any],
    way: str,
    form: str,
) -> None:
    """All formats, mapped and copied: the second start packs nothing, and answers the same."""
    model = tmp_path / "tiny.gguf"
    if form == "gguf":
        write_tiny_gguf(model, weight_type="Q8_0")
    else:
        model = write_tiny_hf(tmp_path / "tiny")
    plain = start(model, packed_cache="off", **settings)
    assert not cache.exists()
    assert start(model, packed_cache=way, **settings) == plain
    size = kept(cache).stat().st_size
    said.clear()
    forbid_packing(monkeypatch)
    assert start(model, packed_cache=way, **settings) == plain
    verb = "copied" if way == "copy" else "mapped"
    assert f"packed weights: {size / 2**20:,.0f} MiB {verb} from {kept(cache)}" in said.text


def test_each_number_format_and_level_has_a_file_of_its_own(model: Path, cache: Path) -> None:
    """And none takes another's for its own, even if it lies in its place."""
    plain = [start(model, packed_cache="off", **settings) for settings in FORMATS]
    for settings in FORMATS:
        start(model, **settings)
    assert len(list(cache.iterdir())) == len(FORMATS)
    assert [start(model, **settings) for settings in FORMATS] == plain
    for level in available_levels()[1:]:
        start(model, isa=level)
    paths = list(cache.iterdir())
    assert len(paths) == len(FORMATS) + len(available_levels()) - 1
    for path in paths:
        for other in paths:
            other.write_bytes(path.read_bytes())
        assert [start(model, **settings) for settings in FORMATS] == plain


@pytest.mark.parametrize("length", [0, 10, 40, 100, 4096, -4096, -1])
def test_a_file_that_is_cut_off_is_not_used(
    model: Path, cache: Path, said: pytest.LogCaptureFixture, length: int
) -> None:
    answers = start(model)
    whole = kept(cache).read_bytes()
    kept(cache).write_bytes(whole[:length])
    assert start(model) == answers
    assert "are not used" in said.text
    assert kept(cache).read_bytes() == whole, "the damaged file was not replaced"


@pytest.mark.parametrize(
    "place", ["magic", "digest", "index", "first weight", "last weight", "end"]
)
def test_a_damaged_file_is_not_used(
    model: Path, cache: Path, said: pytest.LogCaptureFixture, place: str
) -> None:
    """What a start checks: head, index, length, and both ends of every weight."""
    answers = start(model)
    whole = bytearray(kept(cache).read_bytes())
    with kept(cache).open("rb") as file:
        index, begin = packed.read_index(file)
    _, _, offset, nbytes, _ = index["weights"][-1]
    at = {"magic": 3, "digest": 40, "index": 70, "first weight": begin + 9}
    at |= {"last weight": begin + offset + nbytes - 3}
    if place == "end":
        whole += b"more"
    else:
        whole[at[place]] ^= 1
    kept(cache).write_bytes(whole)
    assert start(model) == answers
    assert "are not used" in said.text


def test_another_model_in_the_same_place_is_not_taken_for_the_first(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
) -> None:
    """A model file of the same name and size, with and without its time changed."""
    model = tmp_path / "tiny.gguf"
    others = [write_tiny_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in range(2)]
    answers = [start(path, packed_cache="off") for path in others]
    assert answers[0] != answers[1]
    assert others[0].stat().st_size == others[1].stat().st_size
    shutil.copyfile(others[0], model)
    assert start(model) == answers[0]
    shutil.copyfile(others[1], model)
    assert start(model) == answers[1]
    assert "made from another model file" in said.text
    time = model.stat().st_mtime_ns
    shutil.copyfile(others[0], model)
    os.utime(model, ns=(time, time))
    assert start(model) == answers[0]
    monkeypatch.setattr(packed, "SAMPLES", 1)  # as of a large file, little of which is looked at
    start(model)
    shutil.copyfile(others[1], model)
    os.utime(model, ns=(time, time + 1))
    assert start(model) == answers[1]
    kept(cache)


@pytest.mark.parametrize("moment", ["writing", "before the move"])
def test_a_process_killed_while_it_writes_leaves_nothing_that_is_used(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed halfway through the bytes, and when all are written but not yet in place."""
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    halfway = f"os.writev = lambda fd, v: (os.write(fd, v[0][:5000]), {kill})"
    before = "import os, signal\n" + (
        halfway if moment == "writing" else f"os.fsync = lambda fd: {kill}"
    )
    process = start_apart(model, before)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert kept(cache).name.startswith(packed.PREFIX)
    answers = start(model)
    assert len(list(cache.iterdir())) == 2, "what may still be written was removed"
    for left in cache.glob(packed.PREFIX + "*"):
        os.utime(left, (1, 1))
    next(cache.glob("*.packed")).unlink()
    assert start(model) == answers
    assert not kept(cache).name.startswith(packed.PREFIX)
    forbid_packing(monkeypatch)
    assert start(model) == answers


def test_an_interrupt_at_exit_leaves_the_writing_and_nothing_behind(
    model: Path, cache: Path
) -> None:
    """Ctrl-C while the process only waits for its writer, after a line that says so."""
    before = "import os, time\nos.fsync = lambda fd: time.sleep(600)\npacked.PATIENCE = 0.1"
    process = start_apart(model, before)
    assert process.stderr is not None
    for line in process.stderr:
        if "Ctrl-C leaves that" in line:
            break
    process.send_signal(signal.SIGINT)
    try:
        output, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert output.startswith("[")
    assert (process.returncode, rest) == (0, "")
    assert list(cache.iterdir()) == []


def test_an_interrupt_that_interrupts_no_call_ends_the_wait_too(model: Path, cache: Path) -> None:
    """Another thread got it, as here, or it came just before the wait."""
    before = """
import os, signal, threading, time
packed.PATIENCE, said = 0.1, threading.Event()
packed.logger.addFilter(lambda record: "Ctrl-C" not in record.msg or said.set() or True)
def fsync(fd):
    said.wait()
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(600)
os.fsync = fsync"""
    process = start_apart(model, before)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert list(cache.iterdir()) == []


def test_two_processes_that_start_at_once_both_answer_and_keep_one_file(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [start_apart(model) for _ in range(2)]
    answers = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(answers) == 1
    assert answers.pop().startswith("[")
    assert not kept(cache).name.startswith(packed.PREFIX)
    forbid_packing(monkeypatch)
    start(model)


def test_a_folder_that_can_not_be_written_is_no_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    answers = start(model)
    assert "not kept: " in said.text
    assert "can't be written" in said.text
    assert all(record.levelno == logging.INFO for record in said.records)
    assert answers == start(model, packed_cache="off")


def test_a_full_disk_is_no_error_and_leaves_no_half_file(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, parts: list[memoryview]) -> int:
        os.write(descriptor, parts[0][:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    start(model)
    assert "are not kept" in said.text
    assert "No space left" in said.text
    assert list(cache.iterdir()) == []


def test_calls_that_write_less_than_asked_are_gone_on_with(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = start(model)
    whole = kept(cache).read_bytes()
    kept(cache).unlink()
    monkeypatch.setattr(os, "writev", lambda fd, parts: os.write(fd, parts[0][:777]))
    assert start(model) == answers
    assert kept(cache).read_bytes() == whole


def test_all_files_together_take_their_share_of_the_disk_at_most(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """The one used longest ago goes; a model that takes more than all may is not kept."""
    start(model)
    first = kept(cache)
    start(model, quantization="int8")
    [second] = set(cache.iterdir()) - {first}
    os.utime(first, (500, 500))
    os.utime(second, (1000, 1000))
    start(model)  # used again, so it is not the oldest any more
    room = first.stat().st_size + second.stat().st_size
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 * room, 0, 10 * room))
    start(model, quantization="stored")
    assert first.exists()
    assert not second.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 * room, 0, 1000))
    start(model, dtype="float32")
    assert "too much for the disk" in said.text
    assert len(list(cache.iterdir())) == 2


def test_small_models_are_not_kept(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "MIN_BYTES", 1 << 20)
    start(model)
    assert "packed weights: none kept" in said.text
    assert not cache.exists()


def test_the_files_are_listed_and_removed(
    model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(model)
    path = kept(cache)
    main(["models"])
    assert str(path) in capsys.readouterr().out
    assert main(["models", "clear"]) == 0
    assert "removed 1 files" in capsys.readouterr().out
    assert list(cache.iterdir()) == []
    assert main(["models", "clear"]) == 0
