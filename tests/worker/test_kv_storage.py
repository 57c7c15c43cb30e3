"""How large the KV pool is, and which settings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from beds.tiny_llama import TIED
from octavo.config import CacheConfig
from octavo.errors import ConfigError
from octavo.kernels.reference import ReferenceKernels, make_kernels
from octavo.worker.kv_storage import KVStorage, choose_num_blocks, total_memory

GIB = 2**30


def blocks(cache: CacheConfig, **changes: int) -> int:
    sizes = {
        "bytes_per_token": 1000,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "total_memory": 16 * GIB,
    }
    return choose_num_blocks(cache, **{**sizes, **changes})


def test_default_is_a_quarter_of_memory() -> None:
    assert blocks(CacheConfig(), max_model_len=131072) == 4 * GIB // 16000


def test_default_holds_one_whole_request_at_least() -> None:
    assert blocks(CacheConfig(), total_memory=1) == 512
    assert blocks(CacheConfig(), total_memory=1, max_model_len=8193) == 513


def test_default_is_no_more_than_all_rows_could_use() -> None:
    assert blocks(CacheConfig(), max_num_seqs=2) == 2 * 512


def test_num_kv_blocks_is_taken_as_it_is() -> None:
    """Smaller than one request (which the scheduler then refuses) or larger than the default."""
    assert blocks(CacheConfig(num_kv_blocks=3)) == 3
    assert blocks(CacheConfig(num_kv_blocks=10**6)) == 10**6


def test_kv_cache_memory_holds_whole_blocks() -> None:
    assert blocks(CacheConfig(kv_cache_memory=16000 * 7 + 15999)) == 7
    with pytest.raises(ConfigError, match=r"kv_cache_memory is 15999.*at least 16,000 bytes"):
        blocks(CacheConfig(kv_cache_memory=15999))


def test_slots_stay_within_32_bits() -> None:
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 134217728.*limit is 134,217,727"):
        blocks(CacheConfig(num_kv_blocks=2**27))
    huge = blocks(CacheConfig(), bytes_per_token=1, max_num_seqs=10**6, total_memory=2**50)
    assert huge == 2**27 - 1


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    machine = total_memory(limits=())
    assert machine > GIB // 2
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("123456789\n")
    none.write_text("max\n")
    assert total_memory(limits=(tmp_path / "missing", none, limit)) == 123456789
    assert total_memory(limits=(none,)) == machine


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_pool_is_allocated_once_in_the_logical_shape(dtype: str) -> None:
    """R22: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""
    cache = CacheConfig(num_kv_blocks=5, block_size=8, kv_cache_dtype=dtype)
    storage = KVStorage(TIED, cache, make_kernels(), max_model_len=256, max_num_seqs=4)
    assert storage.num_blocks == storage.kv_cache.num_blocks == 5
    assert storage.kv_cache.nbytes == 2 * 2 * 5 * 8 * 2 * 16 * 4
    assert storage.describe() == "5 blocks of 8 = 40 tokens, 0 MiB reserved"


def test_another_cache_dtype_than_the_backend_has_is_refused() -> None:
    cache = CacheConfig(kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'bfloat16'.*auto or float32"):
        KVStorage(TIED, cache, make_kernels(), max_model_len=256, max_num_seqs=4)


def test_a_pool_that_the_system_refuses_is_a_settings_error() -> None:
    class Full(ReferenceKernels):
        def allocate_kv_cache(self, **sizes: int) -> None:  # type: ignore[override]
            raise MemoryError

    cache = CacheConfig(num_kv_blocks=1000)
    with pytest.raises(ConfigError, match=r"refuses the 8,192,000 bytes.*kv_cache_memory"):
        KVStorage(TIED, cache, Full(), max_model_len=256, max_num_seqs=4)
