"""The KV pool: how large it is, and who holds it."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoint import ModelConfig
from ..config import CacheConfig, must_fit
from ..errors import ConfigError
from ..kernels.api import Kernels, KVCache

DEFAULT_SHARE_OF_RAM = 0.25
MAX_SLOTS = 2**31 - 1
"""Slots are int32 on their way to the kernels."""

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class KVStorage:
    """Allocates the pool once and owns it (R22)."""

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        kernels: Kernels,
        *,
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        """Raises ConfigError if the settings leave no room, or the machine has none."""
        _check_dtype(cache, kernels)
        bytes_per_token = kernels.kv_bytes_per_token(
            num_layers=model.num_hidden_layers,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            dtype=cache.kv_cache_dtype,
        )
        self.block_size = cache.block_size
        self.note = ", int8" if cache.kv_cache_dtype == "int8" else ""
        self.num_blocks = choose_num_blocks(
            cache,
            bytes_per_token=bytes_per_token,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            total_memory=total_memory(),
        )
        nbytes = self.num_blocks * cache.block_size * bytes_per_token
        what = f"the {nbytes:,} bytes that these blocks take (set num_kv_blocks or kv_cache_memory)"
        with must_fit("num_kv_blocks", self.num_blocks, what):
            self.kv_cache: KVCache = kernels.allocate_kv_cache(
                num_layers=model.num_hidden_layers,
                num_blocks=self.num_blocks,
                block_size=cache.block_size,
                num_kv_heads=model.num_key_value_heads,
                head_dim=model.head_dim,
                dtype=cache.kv_cache_dtype,
            )

    def describe(self) -> str:
        """For the start-up report."""
        tokens = self.num_blocks * self.block_size
        return (
            f"{self.num_blocks:,} blocks of {self.block_size} = {tokens:,} tokens, "
            f"{self.kv_cache.nbytes / 2**20:,.0f} MiB reserved{self.note}"
        )


def choose_num_blocks(
    cache: CacheConfig,
    *,
    bytes_per_token: int,
    max_model_len: int,
    max_num_seqs: int,
    total_memory: int,
) -> int:
    """Blocks in the pool: what the settings say, else the larger of one whole request and a
    quarter of RAM, and never more by default than max_num_seqs whole requests could use.

    All sizes in bytes. Raises ConfigError if not one block fits, or slots pass 32 bits.
    """
    bytes_per_block = bytes_per_token * cache.block_size
    if cache.num_kv_blocks is not None:
        num_blocks = cache.num_kv_blocks
    elif cache.kv_cache_memory is not None:
        num_blocks = cache.kv_cache_memory // bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                "kv_cache_memory",
                cache.kv_cache_memory,
                f"at least {bytes_per_block:,} bytes, one block of {cache.block_size} tokens",
            )
    else:
        blocks_per_request = -(-max_model_len // cache.block_size)
        share = int(total_memory * DEFAULT_SHARE_OF_RAM) // bytes_per_block
        num_blocks = min(max(blocks_per_request, share), max_num_seqs * blocks_per_request)
        num_blocks = min(num_blocks, MAX_SLOTS // cache.block_size)
    if num_blocks * cache.block_size > MAX_SLOTS:
        limit = MAX_SLOTS // cache.block_size
        name = "kv_cache_memory" if cache.num_kv_blocks is None else "num_kv_blocks"
        value = getattr(cache, name)
        raise ConfigError(name, value, f"smaller: {num_blocks:,} blocks, the limit is {limit:,}")
    return num_blocks


def total_memory(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """Bytes of RAM this process may use: of the machine, or less where a control group says so."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" means no limit
            memory = min(memory, int(text))
    return memory


def _check_dtype(cache: CacheConfig, kernels: Kernels) -> None:
    own = kernels.kv_cache_dtypes
    if cache.kv_cache_dtype not in ("auto", *own):
        raise ConfigError(
            "kv_cache_dtype",
            cache.kv_cache_dtype,
            f"auto or {' or '.join(own)}, which the {kernels.name} backend has here",
        )
