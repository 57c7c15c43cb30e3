"""Setting up: a fresh machine, a second run, a run cut short; one line for each thing missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_setup", ROOT / "tools" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_setup()


class Machine:
    """A checkout, and commands that only pretend: each is recorded by the step it belongs to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ran: list[str] = []
        self.at_step: dict[str, Callable[[Path], int]] = {}
        (root / "csrc").mkdir()
        (root / "csrc" / "a.cpp").write_text("int a;")
        (root / "CMakeLists.txt").write_text("")
        for name in ("pyproject.toml", "constraints.txt", "requirements-dev.txt"):
            shutil.copy(ROOT / name, root)

    def run(self, command: list[str], log: Path) -> int:
        step = self.step_of(command)
        if step == "probe":
            return 0
        self.ran.append(step)
        if step == "venv":
            (self.root / ".venv" / "bin").mkdir(parents=True)
            (self.root / ".venv" / "bin" / "python").touch()
        return self.at_step.pop(step, lambda log: 0)(log)

    def step_of(self, command: list[str]) -> str:
        if "-std=c++17" in command:
            return "probe"
        if "venv" in command:
            return "venv"
        if "-e" in command:
            return "build"
        return "dev" if "-r" in command else "packages"

    def ensure(self, *, dev: bool = True) -> list[str]:
        """Set up; returns the steps that this took."""
        self.ran.clear()
        setup.Setup(self.root, self.run).ensure(dev=dev)
        return list(self.ran)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


STEPS = ["venv", "packages", "build", "dev"]


def test_a_second_run_does_nothing(machine: Machine) -> None:
    """So `make run` starts in about a second and needs no network."""
    assert machine.ensure() == STEPS
    assert machine.ensure() == []


def test_running_needs_no_development_packages(machine: Machine) -> None:
    assert machine.ensure(dev=False) == STEPS[:3]
    assert machine.ensure(dev=True) == ["dev"]


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ("csrc/a.cpp", ["build"]),
        ("csrc/new/b.hpp", ["build"]),
        ("CMakeLists.txt", ["build"]),
        ("requirements-dev.txt", ["dev"]),
        ("constraints.txt", ["packages", "dev"]),
    ],
)
def test_a_change_repeats_what_depends_on_it(
    machine: Machine, changed: str, steps: list[str]
) -> None:
    machine.ensure()
    path = machine.root / changed
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n# changed\n")
    assert machine.ensure() == steps


def test_a_new_dependency_is_installed(machine: Machine) -> None:
    machine.ensure()
    project = machine.root / "pyproject.toml"
    project.write_text(project.read_text().replace('"numpy', '"frob>=1",\n    "numpy'))
    assert machine.ensure() == ["packages", "build"]


def interrupt(log: Path) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", STEPS)
def test_a_run_cut_short_is_done_over(machine: Machine, step: str) -> None:
    """Ctrl-C in any step: the next run ends as if nothing had happened, the one after rests."""
    machine.at_step[step] = interrupt
    with pytest.raises(KeyboardInterrupt):
        machine.ensure()
    assert machine.ensure() == (["build", "dev"] if step == "build" else STEPS)
    assert machine.ensure() == []


def test_a_build_cut_short_is_cleared_away_before_the_next(machine: Machine) -> None:
    def halve(log: Path) -> int:
        site = machine.root / ".venv" / "lib" / "python3" / "site-packages"
        (site / "octavo-0.1.0.dist-info").mkdir(parents=True)
        (site / "_octavo_editable.py").touch()
        (site / "numpy").mkdir()
        raise KeyboardInterrupt

    machine.at_step["build"] = halve
    with pytest.raises(KeyboardInterrupt):
        machine.ensure()
    machine.ensure()
    assert [p.name for p in machine.root.glob(".venv/lib/python3/site-packages/*")] == ["numpy"]


def test_a_failed_step_is_tried_again(machine: Machine) -> None:
    machine.at_step["build"] = lambda log: log.write_text("csrc/a.cpp:1: error: no such thing\n")
    with pytest.raises(setup.SetupError, match=r"csrc/a.cpp:1: error: no such thing"):
        machine.ensure()
    assert machine.ensure() == ["build", "dev"]


@pytest.mark.parametrize("step", ["packages", "dev"])
def test_no_network_is_said_as_such(machine: Machine, step: str) -> None:
    words = "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution for x\n"
    machine.at_step[step] = lambda log: log.write_text(words)
    with pytest.raises(setup.SetupError, match=r"^no network: .*run it again[^\n]*$"):
        machine.ensure()


def test_a_moved_checkout_gets_a_new_venv(machine: Machine, tmp_path: Path) -> None:
    """Scripts in a venv hold its absolute path."""
    machine.ensure()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for entry in [*tmp_path.iterdir()]:
        if entry != moved:
            entry.rename(moved / entry.name)
    machine.root = moved
    assert machine.ensure() == STEPS


def test_a_venv_whose_python_is_gone_is_made_anew(machine: Machine) -> None:
    machine.ensure()
    (machine.root / ".venv" / "bin" / "python").unlink()
    assert machine.ensure() == STEPS


def test_another_python_that_is_asked_for_makes_a_new_venv(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PYTHON=... is never ignored; without it, .venv keeps the Python that it has."""
    machine.ensure()
    assert machine.ensure() == []
    monkeypatch.setenv("PYTHON", sys.executable)
    assert machine.ensure() == STEPS  # the machine's python is a file of its own
    assert "making it anew" in capsys.readouterr().err
    (machine.root / ".venv" / "bin" / "python").unlink()
    (machine.root / ".venv" / "bin" / "python").symlink_to(setup._base_python())
    assert machine.ensure() == []


def test_a_full_disk_is_said_as_such(machine: Machine) -> None:
    words = "ERROR: Exception:\nOSError: [Errno 28] No space left on device\n"
    machine.at_step["packages"] = lambda log: log.write_text(words)
    with pytest.raises(setup.SetupError, match="no space left for"):
        machine.ensure()


def test_each_step_that_takes_long_is_announced(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.ensure()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(STEPS)
    assert all(line.startswith("setup: ") and line.endswith(" ...") for line in lines)


def test_a_venv_of_someone_else_is_left_alone(machine: Machine) -> None:
    (machine.root / ".venv" / "bin").mkdir(parents=True)
    with pytest.raises(setup.SetupError, match="move it away or delete it"):
        machine.ensure()
    assert (machine.root / ".venv" / "bin").exists()


def test_no_compiler_is_said_before_anything_is_downloaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(machine.root))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(setup.SetupError, match=r"no C\+\+ compiler found .*install one"):
        machine.ensure()
    assert machine.ran == []


def test_a_compiler_too_old_is_said(machine: Machine) -> None:
    run = machine.run
    machine.run = lambda c, log: 1 if "-std=c++17" in c else run(c, log)  # type: ignore[method-assign]
    with pytest.raises(setup.SetupError, match=r"does not compile C\+\+17"):
        machine.ensure()


def test_a_python_without_venv_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup.SetupError, match="has no venv module: install it"):
        machine.ensure()


def test_a_python_without_headers_is_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.sysconfig, "get_paths", lambda: {"include": str(machine.root)})
    with pytest.raises(setup.SetupError, match=r"Python\.h of .* is missing"):
        machine.ensure()


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Makefile and setup.sh with a setup.py that only says who runs it, and a PATH of our own."""
    root = tmp_path / "checkout"
    (root / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", root)
    shutil.copy(ROOT / "tools" / "setup.sh", root / "tools")
    (root / "tools" / "setup.py").write_text("import sys; print('ran', *sys.argv[1:])")
    for tool in ("sh", "dirname", "make"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return root


def run(checkout: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(checkout.parent / "bin"), **variables}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


OLD_PYTHON = 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac'


def test_an_old_python_is_one_line(checkout: Path) -> None:
    script(checkout.parent / "bin" / "python3", OLD_PYTHON)
    done = run(checkout, "sh", "tools/setup.sh")
    assert done.returncode == 1
    assert done.stderr.startswith("setup: Octavo needs Python 3.11 or newer, found Python 3.9.2: ")
    assert done.stderr.count("\n") == 1


def test_a_newer_python_is_found_beside_an_old_one(checkout: Path) -> None:
    script(checkout.parent / "bin" / "python3", OLD_PYTHON)
    (checkout.parent / "bin" / "python3.12").symlink_to(sys.executable)
    done = run(checkout, "sh", "tools/setup.sh", "--dev")
    assert (done.returncode, done.stdout) == (0, "ran --dev\n")


@pytest.mark.parametrize("wanted", ["/no/such/python", "python3.9", "."])
def test_a_python_that_was_asked_for_and_cant_be_used_is_one_line(
    checkout: Path, wanted: str
) -> None:
    """No other Python is taken in its stead."""
    os.symlink(sys.executable, checkout.parent / "bin" / "python3")
    script(checkout.parent / "bin" / "python3.9", OLD_PYTHON)
    done = run(checkout, "sh", "tools/setup.sh", PYTHON=wanted)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"setup: PYTHON={wanted} is no Python 3.11 or newer")
    assert done.stderr.count("\n") == 1
    done = run(checkout, "sh", "tools/setup.sh", PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_make_run_passes_any_prompt_unharmed(checkout: Path) -> None:
    """Quotes, dollars, backslashes and dashes reach the model as they were typed."""
    os.symlink(sys.executable, checkout.parent / "bin" / "python3")
    script(checkout / ".venv" / "bin" / "octavo", 'printf "%s|" "$@"')
    for prompt in ('say "it\'s $5, $(HOME) `x`"', "-v \\n", "what's up?"):
        done = run(checkout, "make", "run", f"PROMPT={prompt}")
        assert done.stdout == f"ran\nchat|smollm2-135m|--prompt={prompt}|"
    done = run(checkout, "make", "run", "MODEL=a b", "PORT=9", "HOST=::1", 'ARGS=--threads "2"')
    assert done.stdout == "ran\nserve|a b|--host=::1|--port=9|--threads|2|"


def test_make_run_fails_when_the_set_up_does(checkout: Path) -> None:
    script(checkout.parent / "bin" / "python3", OLD_PYTHON)
    script(checkout / ".venv" / "bin" / "octavo", "echo started")
    done = run(checkout, "make", "run")
    assert done.returncode != 0
    assert done.stdout == ""
