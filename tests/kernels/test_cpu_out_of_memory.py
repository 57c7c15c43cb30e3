"""Out of memory on a worker thread: the op raises, the process and the team live on."""

from __future__ import annotations

import os
import subprocess
import sys

PROBE = """
import resource
from pathlib import Path
import numpy as np
from octavo.kernels.cpu import make_kernels

ops = make_kernels(threads=1)
cache = ops.allocate_kv_cache(
    num_layers=1, num_blocks=32, block_size=16, num_kv_heads=64, head_dim=256
)
query = np.random.default_rng(0).standard_normal((512, 64, 256), dtype=np.float32)
table, starts = np.arange(32, dtype=np.int32)[None], np.array([0, 512], np.int32)
lens = np.array([512], np.int32)
ops.reshape_and_cache(query, query, cache, 0, np.arange(512, dtype=np.int32))
out = np.zeros((512, 64 * 256), np.float32).astype(ops.dtype)

def attend(rows):
    ops.paged_attention(
        query[:rows], cache, 0, table, np.array([0, rows], np.int32), lens, 0.1, out[:rows]
    )

def mapped():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

attend(512)  # this thread has its scratch memory now, the new ones of the team don't
make_kernels(threads=3)
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (mapped() + (64 << 10), unlimited[1]))
hoard, size = [], 1 << 20
while size >= 1 << 12:  # what the allocator still has
    try:
        hoard.append(bytearray(size))
    except MemoryError:
        size //= 2
for _ in range(30):  # until a worker comes in time to get a share
    try:
        attend(512)
    except MemoryError:
        print("MemoryError")
        break
hoard.clear()
resource.setrlimit(resource.RLIMIT_AS, unlimited)
for _ in range(3):
    out[:] = np.nan
    attend(512)
    assert not np.isnan(out.astype(np.float32)).any()
print("computes again")
"""


def test_a_worker_without_memory_raises_and_the_team_goes_on() -> None:
    """A thread that finds no scratch memory ends neither the process nor the team."""
    one_arena = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # none that a thread has to itself
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, env=one_arena
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.split("\n")[:2] == ["MemoryError", "computes again"]
