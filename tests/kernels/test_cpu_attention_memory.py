"""Attention over long sequences keeps no score matrix: its memory grows with neither T nor S."""

from __future__ import annotations

import subprocess
import sys

import pytest

from beds.cpu_kernels import CASES, IDS

KEYS = 16_384
ROWS = 128
HEADS = 9
LIMIT = 4 << 20
"""Bytes. Scores of the chunk would be 8 MiB for one head and 72 for all."""

PROBE = """
import sys
from pathlib import Path
import numpy as np
from octavo.kernels.cpu import make_kernels

level, dtype, rows, keys, heads = *sys.argv[1:3], *map(int, sys.argv[3:])
ops = make_kernels(threads=2, isa=level, dtype=dtype)
cache = ops.allocate_kv_cache(
    num_layers=1, num_blocks=keys // 16, block_size=16, num_kv_heads=3, head_dim=64
)
for block in range(keys // 16):
    cache.fill_block(block, 0.5)
out = np.ones((rows, heads * 64), np.float32).astype(ops.dtype)

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

def attend(num_rows, end):
    query = np.ones((num_rows, heads, 64), np.float32)
    table = np.arange(keys // 16, dtype=np.int32)[None]
    starts, lens = np.array([0, num_rows], np.int32), np.array([end], np.int32)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = peak()
    ops.paged_attention(query, cache, 0, table, starts, lens, 0.125, out[:num_rows])
    grown = peak() - before
    assert np.abs(out[:num_rows].astype(np.float32) - 0.5).max() < 1e-3
    return grown

attend(1, 64)
print(attend(rows, keys))
"""


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("rows", [1, ROWS])
def test_no_score_matrix_at_16k_tokens(case: tuple[str, str], rows: int) -> None:
    """R47: a decode and the last chunk of a prompt of 16,384 tokens: what a fresh process needs
    more than for a short one stays below what the scores of one head of the chunk would take."""
    level, dtype = case
    command = [sys.executable, "-c", PROBE, level, dtype, str(rows), str(KEYS), str(HEADS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= LIMIT
