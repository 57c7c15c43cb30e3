"""What the cpu backend refuses, and how it chooses its level and its threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from beds.cpu_kernels import LEVELS, kernels, poisoned
from octavo.errors import ConfigError
from octavo.kernels.api import load_backend
from octavo.kernels.cpu import CpuKernels, available_cpus, make_kernels
from octavo.kernels.cpu.threads import cpu_quota


@pytest.fixture
def ops() -> CpuKernels:
    return kernels((LEVELS[0], "bfloat16"))


def test_the_best_level_runs_unless_one_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """isa= before OCTAVO_ISA before the best of the machine."""
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    assert make_kernels().isa == LEVELS[0]
    monkeypatch.setenv("OCTAVO_ISA", "portable")
    assert make_kernels().describe()["isa"] == "portable"
    assert load_backend("cpu", isa=LEVELS[0]).describe()["isa"] == LEVELS[0]


def test_an_unknown_level_names_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that this machine lacks is refused with the list of those it has."""
    with pytest.raises(ConfigError, match=f"isa is 'avx9'.*{', '.join(LEVELS)}"):
        make_kernels(isa="avx9")
    monkeypatch.setenv("OCTAVO_ISA", "sse")
    with pytest.raises(ConfigError, match=r"OCTAVO_ISA is 'sse'.*portable"):
        make_kernels()


def test_bad_threads_and_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        make_kernels(threads=0)
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        make_kernels(dtype="int8")


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5)]
)
def test_the_quota_of_a_container_counts(tmp_path: Path, text: str, quota: float | None) -> None:
    """cgroup v2 and v1 alike."""
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == quota
    assert cpu_quota(tmp_path / "nowhere") is None
    old = tmp_path / "v1" / "cpu"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("-1" if quota is None else str(int(quota * 1e5)))
    (old / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(tmp_path / "v1") == quota
    assert available_cpus() >= 1


def test_ids_out_of_range_are_refused(ops: CpuKernels) -> None:
    """Never out of bounds: token ids, positions, slots, rows."""
    weight = ops.pack_linear(np.ones((40, 8), np.float32))
    out = poisoned((1, 8), np.float32)
    for bad in (-1, 40):
        with pytest.raises(IndexError, match=rf"input_ids\[0\] is {bad}, outside \[0, 40\)"):
            ops.embedding(np.array([bad], np.int32), weight, out)
    heads = np.ones((1, 1, 8), np.float32)
    with pytest.raises(IndexError, match="positions"):
        ops.rotary_embedding(np.array([4], np.int32), heads, heads, np.ones((4, 8), np.float32))
    cache = ops.allocate_kv_cache(
        num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8
    )
    for bad in (-1, 8):
        with pytest.raises(IndexError, match="slot_mapping"):
            ops.reshape_and_cache(heads, heads, cache, 0, np.array([bad], np.int32))
    with pytest.raises(IndexError, match="layer"):
        ops.reshape_and_cache(heads, heads, cache, 1, np.array([0], np.int32))
    with pytest.raises(IndexError, match="indices"):
        ops.gather_rows(out, np.array([1], np.int32), poisoned((1, 8), np.float32))
    with pytest.raises(IndexError, match=r"argmax_only\[0\] is 2, outside \[0, 2\)"):
        ops.lm_head(
            out,
            weight,
            np.array([2], np.int32),
            poisoned((1, 40), np.float32),
            np.empty(1, np.int32),
        )
    with pytest.raises(IndexError, match="block"):
        cache.read_block(0, 2)


def test_a_missing_block_is_refused(ops: CpuKernels) -> None:
    """-1 past the end is fine, -1 under a key is not; nor are lengths that contradict."""
    cache = ops.allocate_kv_cache(
        num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8
    )
    query, out = np.ones((1, 2, 8), np.float32), poisoned((1, 16), np.float32)

    def attend(table: list[int], starts: list[int], lens: list[int]) -> None:
        arrays = [np.array(a, np.int32) for a in ([table], starts, lens)]
        ops.paged_attention(query, cache, 0, *arrays, 1.0, out)

    attend([1, -1], [0, 1], [4])
    with pytest.raises(IndexError, match=r"block_table\[0, 1\] is -1"):
        attend([1, -1], [0, 1], [5])
    with pytest.raises(IndexError, match=r"block_table\[0, 0\] is 2"):
        attend([2, 0], [0, 1], [5])
    with pytest.raises(ValueError, match="too few columns"):
        attend([1, 0], [0, 1], [9])
    with pytest.raises(ValueError, match="query_start_loc"):
        attend([1, 0], [0, 2], [4])
    with pytest.raises(ValueError, match="seq_lens"):
        attend([1, 0], [0, 1], [0])


def test_shapes_and_types_are_checked(ops: CpuKernels) -> None:
    """Clear exceptions for what a model gets wrong."""
    weight = ops.pack_linear(np.ones((4, 8), np.float32))
    x, out = np.ones((2, 8), np.float32), poisoned((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"out is \[2, 5\], but must be \[2, 4\]"):
        ops.linear(x, weight, poisoned((2, 5), np.float32))
    with pytest.raises(ValueError, match=r"x is \[2, 7\]"):
        ops.linear(np.ones((2, 7), np.float32), weight, out)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ops.linear(x.astype(np.float64), weight, out)
    with pytest.raises(ValueError, match="contiguous"):
        ops.linear(np.ones((2, 16), np.float32)[:, ::2], weight, out)
    odd = ops.pack_linear(np.ones((5, 8), np.float32))
    for gate_up_proj, cols, text in (
        (weight, 4, r"out is \[2, 4\], but must be \[2, 2\]"),
        (odd, 2, "as many rows for gate as for up"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.linear_silu_and_mul(x, gate_up_proj, poisoned((2, cols), np.float32))
    with pytest.raises(ValueError, match=r"x is \[2, 7\]"):
        ops.linear_silu_and_mul(np.ones((2, 7), np.float32), weight, out[:, :2])
    flags, best = np.zeros(2, np.int32), np.empty(2, np.int32)
    for args, text in (
        ((x, weight, flags, poisoned((2, 5), np.float32), best), r"logits is \[2, 5\]"),
        ((x, weight, flags, out.astype(ops.dtype), best), "logits must be float32"),
        ((np.ones((2, 7), np.float32), weight, flags, out, best), r"x is \[2, 7\]"),
        ((x, weight, flags[:1], out, best), "argmax_only has 1 entries, but must have 2"),
        ((x, weight, flags, out, best[:1]), "best has the wrong"),
        ((x, weight, flags, out, best.astype(np.int64)), "best has the wrong"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.lm_head(*args)
    with pytest.raises(ValueError, match="even"):
        ops.allocate_kv_cache(num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=7)
    with pytest.raises(ValueError, match="power of two"):
        ops.allocate_kv_cache(num_layers=1, num_blocks=1, block_size=3, num_kv_heads=1, head_dim=8)
    other = kernels((LEVELS[0], "float32"))
    cache = other.allocate_kv_cache(
        num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8
    )
    heads = np.ones((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="another dtype"):
        ops.reshape_and_cache(heads, heads, cache, 0, np.array([0], np.int32))


def test_no_rows_is_no_work(ops: CpuKernels) -> None:
    """T = 0 passes through every op."""
    weight = ops.pack_linear(np.ones((4, 8), np.float32))
    none = np.empty((0, 8), np.float32)
    no_ids = np.empty(0, np.int32)
    ops.linear(none, weight, np.empty((0, 4), np.float32))
    ops.linear_silu_and_mul(none, weight, np.empty((0, 2), np.float32))
    ops.lm_head(none, weight, no_ids, np.empty((0, 4), np.float32), no_ids)
    ops.embedding(no_ids, weight, none)
    ops.rms_norm(none, np.ones(8, np.float32), 1e-5, none)
    ops.gather_rows(none, no_ids, none)
    cache = ops.allocate_kv_cache(
        num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8
    )
    table, starts = np.empty((0, 1), np.int32), np.zeros(1, np.int32)
    ops.paged_attention(np.empty((0, 1, 8), np.float32), cache, 0, table, starts, no_ids, 1.0, none)


def test_python_threads_may_call_at_once(ops: CpuKernels) -> None:
    """One team for the process: a second caller runs alone, with the same result."""
    rng = np.random.default_rng(0)
    weight = ops.pack_linear(rng.standard_normal((512, 256), dtype=np.float32))
    x = rng.standard_normal((64, 256), dtype=np.float32)
    want = poisoned((64, 512), np.float32)
    ops.linear(x, weight, want)
    outs = [poisoned((64, 512), np.float32) for _ in range(4)]

    def work(out: np.ndarray) -> None:
        for _ in range(20):
            ops.linear(x, weight, out)

    workers = [threading.Thread(target=work, args=(out,)) for out in outs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for out in outs:
        np.testing.assert_array_equal(out, want)
