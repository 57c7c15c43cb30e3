"""What each command prints where, and how it ends: with a scripted engine."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from beds.fake_llm import FakeLLM, made
from octavo.cli.main import main
from octavo.errors import ModelLoadError
from octavo.outputs import StreamEvent

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_generate_prints_the_exact_text_and_nothing_else_on_stdout(
    engine: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    """Statistics go to stderr; the prompt is continued raw, greedily unless asked otherwise."""
    assert main(["generate", "--prompt", "The capital"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris."
    assert "prompt: 11 tokens" in err
    assert "generation: 3 tokens" in err
    assert err.count("tok/s") == 2
    [(prompt, params)] = made[0].asked
    assert prompt == "The capital"
    assert (params.temperature, params.max_tokens) == (0.0, 256)
    assert made[0].is_closed, "what is to outlive the process is written"


@pytest.mark.parametrize(("flags", "max_tokens"), [([], 60), (["--max-tokens", "61"], 61)])
def test_a_default_that_nobody_asked_for_gives_way_to_the_limits(
    engine: type[FakeLLM], flags: list[str], max_tokens: int
) -> None:
    """A long prompt is answered as far as there is room; what was asked for is never cut."""
    assert main(["generate", "--prompt", "x" * 1940, *flags]) == 0
    assert main(["chat", "--prompt", "x" * 1926, *flags]) == 0  # 14 are the template's
    assert [llm.asked[0][1].max_tokens for llm in made] == [max_tokens, max_tokens]


def test_sampling_flags_override_the_models_defaults(engine: type[FakeLLM]) -> None:
    """Precedence: the user, then the model (top_p 0.9 here), then the usual default."""
    flags = ["--temperature", "0.5", "--top-k", "5", "--min_p", "0.1", "--stop", "a", "--stop", "b"]
    assert (
        main(["generate", "m", "--prompt", "x", "--max-tokens", "9", "--threads", "2", *flags]) == 0
    )
    [(_, params)] = made[0].asked
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.max_tokens, params.stop) == (9, ("a", "b"))
    assert (made[0].config.model, made[0].settings) == ("m", {"threads": 2})


def test_chat_with_a_prompt_answers_once_through_the_template(
    engine: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    """What `make run PROMPT=...` runs."""
    assert main(["chat", "--prompt", "hi", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert err.count("tok/s") == 2
    assert made[0].asked[0][0] == "<system>Be brief.<user>hi<answer>"


def feed(monkeypatch: pytest.MonkeyPatch, *lines: object) -> None:
    """Answers of input(): text, or an exception; then the end of input."""
    waiting = [*lines, EOFError()]

    def read(prompt: str = "") -> str:
        item = waiting.pop(0)
        if isinstance(item, BaseException):
            raise item
        return str(item)

    monkeypatch.setattr("builtins.input", read)


def test_chat_remembers_until_cleared(
    engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, "one", "", "two", KeyboardInterrupt(), "/clear", "three", "/help", "/frob")
    assert main(["chat"]) == 0
    assert [prompt for prompt, _ in made[0].asked] == [
        "<user>one<answer>",
        "<user>one<assistant>Paris.<user>two<answer>",
        "<user>three<answer>",
    ]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes effect between steps: the engine stays whole, and the request is closed."""
    engine.script = ["Once", lambda: os.kill(os.getpid(), signal.SIGINT), " upon", " a time"]
    feed(monkeypatch, "tell", "go on")
    assert main(["chat"]) == 0
    assert made[0].asked[1][0] == "<user>tell<assistant>Once upon<user>go on<answer>"
    assert made[0].num_closed == 2
    assert "(stopped)" in capsys.readouterr().err


def test_a_refused_turn_leaves_nothing_and_the_conversation_goes_on(
    engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault ends one answer, never the conversation (C106)."""
    fault = StreamEvent(0, 0, "", (), finish_reason="error", error="row went bad")
    engine.script = [fault]
    feed(monkeypatch, "one", "two")
    assert main(["chat"]) == 0
    assert [prompt for prompt, _ in made[0].asked] == ["<user>one<answer>", "<user>two<answer>"]
    assert capsys.readouterr().err.count("octavo: row went bad") == 2


def test_interrupting_one_answer_exits_130_without_a_traceback(
    engine: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = ["a", lambda: os.kill(os.getpid(), signal.SIGINT), "b", "c"]
    assert main(["generate", "--prompt", "x"]) == 130
    assert capsys.readouterr() == ("ab", "\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupted_before_the_command_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.cli.main.build_parser", lambda: signal.raise_signal(signal.SIGINT))
    assert main(["models"]) == 130
    assert capsys.readouterr() == ("", "\n")


@pytest.mark.parametrize("module", ["argparse", "octavo.cli.main", "octavo.cli.options"])
def test_interrupted_while_modules_are_imported_is_quiet(module: str) -> None:
    """By the entry that the installed command has, from its first import on."""
    entry = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]["octavo"]
    script = f"""
import importlib.metadata, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
for name in [name for name in sys.modules if name == {module!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Interrupting())
sys.argv = ["octavo", "models"]
sys.exit(importlib.metadata.EntryPoint("octavo", {entry!r}, "console_scripts").load()())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("Unable to allocate 2.9 PiB")])
def test_settings_that_no_memory_can_hold_are_one_line(
    error: MemoryError, engine: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = [error]
    assert main(["generate", "--prompt", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("octavo: not enough memory")
    assert str(error) in err
    assert err.count("\n") == 1


def test_an_answer_that_waited_too_long_is_an_error(
    engine: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = [StreamEvent(0, 0, "", (), finish_reason="timeout")]
    assert main(["generate", "--prompt", "x"]) == 1
    assert "max_queue_seconds" in capsys.readouterr().err


def test_an_error_is_one_line_on_stderr_and_exit_1(
    engine: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = [ModelLoadError("model.gguf is cut short: fetch it again")]
    assert main(["generate", "--prompt", "x"]) == 1
    assert capsys.readouterr() == ("", "octavo: model.gguf is cut short: fetch it again\n")


def test_a_bug_of_ours_keeps_its_traceback(engine: type[FakeLLM]) -> None:
    """Only errors meant for users are turned into one line."""
    engine.script = [AssertionError("leaked")]
    with pytest.raises(AssertionError, match="leaked"):
        main(["generate", "--prompt", "x"])


SCRIPT = """
    import sys
    from types import ModuleType
    from octavo.cli.main import main
    from beds.fake_llm import FakeLLM
    FakeLLM.script = ["line \\u6f22\\n"] * 50
    module = ModuleType("octavo.engine.llm")
    module.LLM = FakeLLM
    sys.modules["octavo.engine.llm"] = module
    sys.exit(main(sys.argv[1:]))
"""


def command(
    *arguments: str, stdout: int, stdin: int = subprocess.DEVNULL, **variables: str
) -> subprocess.Popen[bytes]:
    """`octavo` with the scripted engine, as a process of its own."""
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    buffered = {"PYTHONUNBUFFERED": ""}  # argparse swallows what a write says, but not a flush
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        stdin=stdin,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **buffered, **variables},
    )


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["chat", "--help"]])
def test_a_reader_that_leaves_ends_generate_quietly(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = command(*arguments, stdout=write_end)
    os.close(write_end)
    err = process.communicate()[1]
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["--help"], ["models"]])
def test_a_full_disk_behind_stdout_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = command(*arguments, stdout=full.fileno())
        err = process.communicate()[1]
    wanted = b"octavo: can't write the output: No space left on device\n"
    assert (process.returncode, err) == (1, wanted)


def test_a_terminal_of_another_encoding_gets_what_it_can_show() -> None:
    process = command(
        "generate", "--prompt", "x", stdout=subprocess.PIPE, PYTHONIOENCODING="latin-1"
    )
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == b"line ?\n" * 50


@pytest.mark.parametrize("at_terminal", [False, True])
def test_chat_takes_bytes_that_are_no_utf8(at_terminal: bool) -> None:
    """As generate does: each becomes U+FFFD, and the conversation goes on."""
    if at_terminal:
        ours, theirs = pty.openpty()
    else:
        theirs, ours = os.pipe()
    process = command("chat", stdin=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    os.write(ours, b"caf\xe9\n/exit\n")
    out, err = process.communicate(timeout=30)
    os.close(ours)
    assert process.returncode == 0, err
    assert out.count(b"line") == 50
    assert b"Traceback" not in err


def test_exit_and_quit_leave_a_chat(
    engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("/exit", "/quit"):
        feed(monkeypatch, "one", word, "two")
        assert main(["chat"]) == 0
        assert len(made[-1].asked) == 1
    assert "unknown command" not in capsys.readouterr().err


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """Replace a module of the package by one with these contents."""
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_serve_hands_over_what_was_asked_and_loads_when_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server takes the port first: a busy port is told before a model loads."""
    calls: list[tuple[str, dict[str, object]]] = []

    def serve(load_engine: Callable[[], object], **options: object) -> int:
        calls.append(("serve", options))
        load_engine()
        return 3

    def engine(model: str, **settings: object) -> None:
        calls.append((model, settings))

    stand_in(monkeypatch, "octavo.server.serve", serve=serve)
    stand_in(monkeypatch, "octavo.engine.async_llm", AsyncLLM=engine)
    monkeypatch.setenv("OCTAVO_API_KEY", "from-the-environment")
    flags = ["--port", "9", "--served-model-name", "a", "--served-model-name", "b"]
    assert main(["serve", "m", "--max-num-seqs", "4", *flags]) == 3
    wanted = {
        "host": "127.0.0.1",
        "port": 9,
        "api_key": "from-the-environment",
        "served_model_names": ["a", "b"],
        "shutdown_timeout": 30.0,
    }
    assert calls == [("serve", wanted), ("m", {"max_num_seqs": 4})]


def test_models_says_what_is_known_and_what_is_cached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(alias: str, path: Path | None) -> SimpleNamespace:
        cached = path is not None
        return SimpleNamespace(
            alias=alias, description="a model", is_cached=cached, num_bytes=98_362_432, path=path
        )

    fetched: list[str] = []

    def open_checkpoint(name: str, *, verify: bool) -> SimpleNamespace:
        assert verify
        fetched.append(name)
        return SimpleNamespace(path=Path("cache/x.gguf"))

    rows = [row("here", Path("cache/here.gguf")), row("there", None)]
    stand_in(
        monkeypatch,
        "octavo.weights.sources",
        list_models=lambda: rows,
        open_checkpoint=open_checkpoint,
    )
    monkeypatch.setenv("OCTAVO_CACHE", str(Path(__file__)))
    assert main(["models"]) == 1
    assert f"{__file__} is a file; set OCTAVO_CACHE" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_CACHE", str(Path(__file__).parent))
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "98 MB" in out
    assert "cache/here.gguf" in out
    assert "not fetched: octavo models fetch there" in out
    assert main(["models", "fetch"]) == 0
    assert main(["models", "fetch", "there"]) == 0
    assert fetched == ["smollm2-135m", "there"]
    assert capsys.readouterr().out == "cache/x.gguf\n" * 2


def write_workload(folder: Path, content: object) -> str:
    path = folder / "workload.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


REQUESTS = [
    {"id": 0, "prompt_ids": [1, 2, 3], "max_tokens": 4},
    {"prompt_ids": [1], "max_tokens": 6},
]


def test_bench_throughput_prints_one_json_object(
    engine: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures, by the names that stay stable; steps and preemptions are this run's alone."""
    path = write_workload(tmp_path, {"name": "w", "requests": REQUESTS})
    assert main(["bench", "throughput", "--workload", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    named = {"gen_tok_s", "total_tok_s", "wall_s", "peak_rss_mb", "steps", "cached_tokens"}
    assert named | {"preemptions", "load_s"} <= set(report)
    assert (report["prompt_tokens"], report["gen_tokens"]) == (4, 10)
    assert (report["steps"], report["preemptions"], report["cached_tokens"]) == (20, 2, 4)
    assert report["total_tok_s"] == pytest.approx(report["gen_tok_s"] * 1.4, rel=0.01)
    assert report["peak_rss_mb"] > 1


def test_bench_throughput_prints_a_table_for_people(
    engine: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_workload(tmp_path, {"requests": REQUESTS})
    assert main(["bench", "throughput", "--workload", path]) == 0
    out = capsys.readouterr().out
    assert "gen_tok_s" in out
    assert "{" not in out


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        [],
        {},
        {"requests": []},
        {"requests": [{"prompt_ids": [], "max_tokens": 1}]},
        {"requests": [{"prompt_ids": ["a"], "max_tokens": 1}]},
        {"requests": [{"prompt_ids": [1], "max_tokens": 0}]},
        {"requests": [{"prompt": "x", "max_tokens": 1}]},
    ],
    ids=lambda content: json.dumps(content)[:60],
)
def test_a_broken_workload_is_refused_before_anything_loads(
    content: object, engine: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_workload(tmp_path, content)
    assert main(["bench", "throughput", "--workload", path]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert made == []
    assert main(["bench", "throughput", "--workload", path + "x"]) == 1
    assert "can't read" in capsys.readouterr().err
