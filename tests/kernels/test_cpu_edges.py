"""No op reads or writes past its arrays, also where the sanitizers can't see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from beds.cpu_kernels import DTYPES
from octavo.kernels.cpu import available_levels

TOUCH = """
import ctypes, sys, numpy as np
from beds.edges import at_edge
x = at_edge(np.arange(5, dtype=np.float32), sys.argv[1])
assert x.tolist() == [0, 1, 2, 3, 4]
offset = -1 if sys.argv[1] == "start" else x.nbytes
print("touching", flush=True)
ctypes.string_at(x.ctypes.data + offset, 1)
"""


def python(*args: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):  # a fault is to end the process as what it is
        settings[name] = settings.get(name, "") + ":handle_segv=0"
    return subprocess.run(
        [sys.executable, *args], env=settings, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("level", available_levels())
def test_no_op_touches_what_lies_beside_its_arrays(level: str) -> None:
    """Every array begins after, or ends before, a page that nobody may touch; the bits are those
    of ordinary memory."""
    done = python("-X", "faulthandler", "-m", "beds.edges", level)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"{level} {dtype}" for dtype in DTYPES
    ]


@pytest.mark.parametrize("side", ["start", "end"])
def test_a_byte_past_an_edge_ends_the_process(side: str) -> None:
    done = python("-c", TOUCH, side)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "touching\n")
