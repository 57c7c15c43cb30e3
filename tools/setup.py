"""Make .venv ready to run Octavo: packages, the native library and, on demand, more.

    sh tools/setup.sh [--dev] [--model NAME]

Each step leaves a stamp with a hash of what it was made from, so that a second run does nothing
and needs no network. A step that was cut short (Ctrl-C, power) is found at the next run by the
name in `unfinished`, and done over. Standard library only; started by setup.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ["cmake", "ninja"]
NO_NETWORK = (
    "Failed to establish a new connection",
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "ConnectTimeout",
    "Read timed out",
    "Connection refused",
    "ProxyError",
)

Run = Callable[[list[str], Path], int]
"""Runs a command with its output appended to a log file; returns the exit code."""


class SetupError(Exception):
    """Something is missing; the text says what, and what to do, in one line."""


def run_logged(command: list[str], log: Path) -> int:
    with log.open("a") as out:
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


class Setup:
    """The steps, over one checkout. Raises SetupError."""

    def __init__(self, root: Path = ROOT, run: Run = run_logged) -> None:
        self.root = root
        self.run = run
        self.venv = root / ".venv"
        self.state = self.venv / ".octavo"
        self.rubbish = root / ".venv.removed"
        self.python = self.venv / "bin" / "python"
        self.project = tomllib.loads((root / "pyproject.toml").read_text())

    def ensure(self, *, dev: bool = False) -> None:
        """Bring .venv up to date."""
        self._recover()
        self._venv()
        runtime = [*self.project["build-system"]["requires"], *BUILD_TOOLS]
        runtime += self.project["project"]["dependencies"]
        constraints = (self.root / "constraints.txt").read_bytes()
        with self._step("packages", _digest(repr(runtime).encode(), constraints)) as due:
            if due:
                self._check_can_build()
                say("installing packages (about 100 MB; once) ...")
                self._pip("packages", "-c", str(self.root / "constraints.txt"), *runtime)
        with self._step("build", self._sources()) as due:
            if due:
                self._check_can_build()
                say("building the native library (a minute or two on two cores) ...")
                self._pip("build", "--no-deps", "--no-build-isolation", "-e", str(self.root))
        if dev:
            lock = self.root / "requirements-dev.txt"
            with self._step("dev", _digest(lock.read_bytes(), constraints)) as due:
                if due:
                    say("installing what tests and checks need (a minute or two; once) ...")
                    self._pip("dev", "-r", str(lock))

    @contextlib.contextmanager
    def _step(self, name: str, digest: str) -> Iterator[bool]:
        """Yields whether the step is due; stamps it when its body ends well.

        An error leaves no stamp. An interrupt leaves `unfinished` too, since files may be halved.
        """
        stamp = self.state / name
        if stamp.exists() and stamp.read_text() == digest:
            yield False
            return
        unfinished = self.state / "unfinished"
        stamp.unlink(missing_ok=True)
        unfinished.write_text(name)
        try:
            yield True
        except SetupError:
            unfinished.unlink()
            raise
        stamp.write_text(digest)
        unfinished.unlink()

    def _recover(self) -> None:
        """Clear away what a run that was cut short left behind."""
        if self.rubbish.exists():
            shutil.rmtree(self.rubbish)
        unfinished = self.state / "unfinished"
        if self.state.exists() and self._moved():
            say("this checkout was moved: making .venv anew")
            self._remove()
        elif self.state.exists() and os.environ.get("PYTHON") and not self._made_with_ours():
            made_with, ours = self.python.resolve(), _base_python()
            say(f".venv was made with {made_with}: making it anew with {ours}, as PYTHON asks")
            self._remove()
        elif unfinished.exists():
            step = unfinished.read_text()
            say(f"the last set-up was cut short ({step or 'start'}): doing it over")
            if step != "build":  # a package may be half installed; only the build can be redone
                self._remove()
                return
            for site in self.venv.glob("lib/*/site-packages"):
                for left in [*site.glob("octavo*"), *site.glob("_octavo*")]:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            unfinished.unlink()

    def _moved(self) -> bool:
        made_at = self.state / "venv"
        return made_at.exists() and made_at.read_text() != str(self.root)

    def _made_with_ours(self) -> bool:
        """Whether .venv has the interpreter that runs us (setup.sh runs us by $PYTHON)."""
        return self.python.resolve() == Path(_base_python()).resolve()

    def _remove(self) -> None:
        """Remove .venv and what was built: by a rename first, which an interrupt can't halve."""
        self.venv.rename(self.rubbish)
        shutil.rmtree(self.rubbish)
        shutil.rmtree(self.root / "build", ignore_errors=True)

    def _venv(self) -> None:
        if (self.state / "venv").exists() and self.python.exists():
            return
        if self.state.exists():
            self._remove()  # its Python is gone
        if self.venv.exists() and any(self.venv.iterdir()):
            raise SetupError(".venv was not made by this set-up: move it away or delete it")
        self._check_can_build()
        missing = [m for m in ("venv", "ensurepip") if importlib.util.find_spec(m) is None]
        if missing:
            raise SetupError(
                f"{_base_python()} has no {missing[0]} module: install it (on Debian and Ubuntu: "
                "apt install python3-venv), or choose another Python with PYTHON=..."
            )
        say(f"making .venv with {_base_python()} ...")
        self.state.mkdir(parents=True)
        with self._step("venv", str(self.root)):
            if self.run([_base_python(), "-m", "venv", str(self.venv)], self._log("venv")):
                log = self._log("venv", keep=True)
                raise SetupError(f"could not make .venv; see {log}")

    def _pip(self, step: str, *arguments: str) -> None:
        log = self._log(step)
        pip = [str(self.python), "-m", "pip", "install", "--no-input", "--retries", "2"]
        pip += ["--disable-pip-version-check", "--progress-bar", "off", *arguments]
        if self.run(pip, log) == 0:
            return
        text = log.read_text(errors="replace")
        kept = self._log(step, keep=True)
        if "No space left on device" in text:
            raise SetupError(f"no space left for {self.venv}: free some, and run it again")
        if any(sign in text for sign in NO_NETWORK):
            raise SetupError(
                "no network: the first run downloads packages from the package index; "
                f"connect and run it again (details: {kept})"
            )
        signs = (": error:", "CMake Error", "Error: ") if step == "build" else ("ERROR:",)
        lines = [line.strip() for sign in signs for line in text.splitlines() if sign in line]
        first = lines[0] if lines else ""
        doing = "building the native library" if step == "build" else f"installing {step}"
        raise SetupError(f"{doing} failed: {first or 'no reason given'} (details: {kept})")

    def _log(self, step: str, *, keep: bool = False) -> Path:
        """The step's log: inside .venv, so that a clean removes it; emptied unless `keep`."""
        log = self.state / f"{step}.log"
        if not keep:
            log.write_text("")
        return log

    def _sources(self) -> str:
        """Hash of all that the native library and the installed metadata are made from."""
        paths = [self.root / "pyproject.toml", self.root / "CMakeLists.txt"]
        paths += sorted(p for p in (self.root / "csrc").rglob("*") if p.is_file())
        parts = [p.name.encode() + b"\0" + p.read_bytes() for p in paths if p.exists()]
        return _digest(*parts)

    def _check_can_build(self) -> None:
        """Say at once, before anything is downloaded, that the build can't work."""
        asked = shlex.split(os.environ.get("CXX", ""))
        names = asked[:1] or ["c++", "g++", "clang++"]
        compiler = next((found for name in names if (found := shutil.which(name))), None)
        advice = "install one (on Debian and Ubuntu: apt install g++), or set CXX=/path/to/it"
        if compiler is None:
            raise SetupError(f"no C++ compiler found ({', '.join(names)}): {advice}")
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text("#include <optional>\nint main() { if constexpr (true) return 0; }\n")
            probe = [compiler, *asked[1:], "-std=c++17", "-c", str(source), "-o", os.devnull]
            if self.run(probe, Path(folder) / "log"):
                raise SetupError(f"{compiler} does not compile C++17: {advice}")
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            raise SetupError(
                f"Python.h of {_base_python()} is missing: install Python's headers (on Debian "
                "and Ubuntu: apt install python3-dev), or choose another Python with PYTHON=..."
            )


def _base_python() -> str:
    """The interpreter behind this one: .venv may have to be made anew while we run from it."""
    return str(getattr(sys, "_base_executable", "") or sys.executable)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """One set-up at a time in a checkout; a second one waits."""
    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running in this checkout: waiting for it")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    parser.add_argument("--model", metavar="NAME", help="also fetch this model into the cache")
    args = parser.parse_args()
    try:
        with alone(ROOT):
            Setup().ensure(dev=args.dev)
        if args.model:
            octavo = [str(ROOT / ".venv" / "bin" / "octavo"), "models", "fetch", args.model]
            return subprocess.run(octavo, stdout=subprocess.DEVNULL, check=False).returncode
        return 0
    except SetupError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"{error.strerror}: {error.filename}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run takes up from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
