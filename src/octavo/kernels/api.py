"""The op table: everything a model may compute with, as one Protocol that each backend fills.

Dimensions, here and in every docstring below this layer:
  T  tokens scheduled this step, over all requests      B  requests scheduled this step
  S  sampled rows                                       H  hidden_size
  NH, KH, D  num_heads, num_kv_heads, head_dim          I  intermediate_size
  N, K  out_features and in_features of a linear layer  V  vocab_size

Every op writes into the `out` that it is given and allocates nothing; models take memory from the
step's arena only. Activations are `Kernels.dtype`, the residual stream is float32. An op that
reads activations takes `Kernels.dtype` or float32; `out` may be either, too: its dtype decides.
Index arrays are int32. The last axis of every array is contiguous; other axes may be strided
(q, k, v are views into one qkv array).

Law for every backend: a row of any output depends on that row's own inputs only, to the bit:
not on T or B, on the row's place, on chunk borders, on the block ids or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..checkpoint import Checkpoint, StoredRows
from ..errors import ConfigError

Array = np.ndarray[Any, Any]


class Linear(Protocol):
    """A weight matrix [N, K], packed for its backend; opaque to models."""

    out_features: int
    in_features: int
    nbytes: int


class KVCache(Protocol):
    """The pool, logically [num_layers, 2, num_blocks, block_size, KH, D], laid out as the
    backend likes."""

    num_layers: int
    num_blocks: int
    block_size: int
    nbytes: int
    block_nbytes: int
    """Bytes of one block, over all layers."""

    def save_block(self, block_id: int, out: Array) -> None:
        """Copy K and V of one block, as they lie in the pool, to out [block_nbytes] uint8."""
        ...

    def restore_block(self, block_id: int, data: Array) -> None:
        """Put back what save_block copied, into any block: the same bits (R34, R98)."""
        ...

    def read_block(self, layer: int, block_id: int) -> tuple[Array, Array]:
        """K and V of one block in the logical shape [block_size, KH, D], as a float32 copy."""
        ...

    def fill_block(self, block_id: int, value: float) -> None:
        """Overwrite K and V of one block in all layers (tests poison freed blocks with NaN)."""
        ...


class Arena(Protocol):
    """Scratch memory of one step: bump allocation, all given back by reset()."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised array, aligned to 64 bytes, valid until reset()."""
        ...

    def reset(self) -> None:
        """Start over; memory is kept for the next step."""
        ...


class SamplingKernels(Protocol):
    """Whole rows of logits at once, each by one thread; what is computed is defined by
    octavo.sampling. logits [S, V] float32, rows [R] int32 the rows that are meant; NaN logits
    become -inf in place."""

    def mask(self, logits: Array, rows: Array, masks: Array) -> None:
        """Bar (-inf) what masks [R, M] uint8 leave out: token i stays where bit i % 8, the lowest
        first, of byte i // 8 is set (32 ids in a little-endian word)."""
        ...

    def sample(
        self,
        logits: Array,
        rows: Array,
        temperature: Array,
        min_p_floor: Array,
        top_k: Array,
        top_p: Array,
        seeds: Array,
        positions: Array,
        show: Array,
        out: Array,
    ) -> None:
        """out[R] int32 = token ids, or -1 where the largest logit is infinite.

        temperature [R] float32 (0: greedy), min_p_floor [R] float32 (the least scaled logit that
        stays), top_k [R] int32 (0: off), top_p [R] float64, seeds [R] uint64, positions [R] int64,
        show [R] uint8: where set, a row with a temperature becomes what was drawn from: scaled
        logits, -inf where they were dropped.
        """
        ...

    def logprobs(
        self,
        logits: Array,
        rows: Array,
        token_ids: Array,
        log_sum_exps: Array,
        ranks: Array,
        top: Array,
    ) -> None:
        """log_sum_exps [R] float64, ranks [R] int32 of token_ids [R] int32 (0 where the largest
        logit is infinite) and top [R, num_top] int32, the best ids, best first."""
        ...


class StepBatch(Protocol):
    """A step's index arrays as models take them (models/batch.py), here for their number only."""

    @property
    def input_ids(self) -> Array:
        """[T]"""
        ...

    @property
    def logits_indices(self) -> Array:
        """[S]"""
        ...

    def __iter__(self) -> Iterator[Any]:
        """All fields, in order."""
        ...


class HeadOutput(NamedTuple):
    """What an LM head leaves of the sampled rows."""

    logits: Array
    """[S, V] float32; rows that have an entry in `best` hold anything."""

    best: Array
    """[S] int32: the token with the largest logit where no more was asked for, else -1."""


Forward = Callable[[Any, KVCache, Arena], HeadOutput]
"""A model's forward(batch, kv_cache, arena) -> logits, or the best tokens, of the sampled rows."""


class Kernels(Protocol):
    """One backend."""

    name: str
    dtype: Any
    """numpy dtype of activations (ml_dtypes.bfloat16 or float32)."""

    sampling: SamplingKernels | None
    """None: the sampler's own numpy is all there is."""

    stored_kinds: frozenset[str]
    """Formats of model files (Q8_0, Q4_1, ...) that pack_stored takes; may be empty."""

    def describe(self) -> dict[str, str]:
        """What runs, for the start-up report: isa level, threads, dtype."""
        ...

    def make_arena(self) -> Arena: ...

    def capture(
        self, forward: Forward, kv_cache: KVCache, batches: Sequence[StepBatch]
    ) -> Forward | None:
        """A quicker equal of a model's `forward`, to the bit; None where there is none.

        It may be made by running `forward` on each of `batches`: steps whose results nobody reads,
        one that samples and one that doesn't, with T != S. What they write into `kv_cache` is void.
        """
        ...

    def pack_linear(self, weight: Array) -> Linear:
        """Pack a float32 [N, K] weight once, at load; the caller may overwrite it afterwards."""
        ...

    def pack_stored(self, parts: Sequence[StoredRows], in_features: int) -> Linear | None:
        """Pack weights stacked along N in their stored formats, all in `stored_kinds`: kept in
        them, or brought into the form that pack_linear gives.

        Products equal those of the same weights dequantised and given to pack_linear. None where
        the parts can't be put together: the caller dequantises then.
        """
        ...

    def open_packed(self, checkpoint: Checkpoint) -> AbstractContextManager[None]:
        """Within it, pack_once takes what an earlier start packed of this checkpoint, and what it
        packs now is kept for the next, where the backend has such a cache. A failure keeps none."""
        ...

    def pack_once(self, key: str, pack: Callable[[], Linear]) -> Linear:
        """pack(), or an equal, to the bit, of what it gave for this key at an earlier start."""
        ...

    def pack_vector(self, weight: Array) -> Array:
        """Bring a norm weight [H] into the form that the norms read."""
        ...

    kv_cache_dtypes: tuple[str, ...]
    """What a pool may hold: the dtype itself; int8, with one scale per token and head."""

    def allocate_kv_cache(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "auto",
    ) -> KVCache:
        """Reserve the pool once; pages become resident on first use only.

        dtype: one of kv_cache_dtypes, or "auto" for that of the activations.
        """
        ...

    def kv_bytes_per_token(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "auto"
    ) -> int:
        """Bytes of the pool that one token takes, over all layers."""
        ...

    def embedding(self, input_ids: Array, weight: Linear, out: Array) -> None:
        """out[T, H] float32 = rows input_ids[T] of weight [V, H] (R36)."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out[T, H] = x * rsqrt(mean(x^2) + eps) * weight; scale only, no shift (R37)."""
        ...

    def fused_add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        """residual[T, H] += x[T, H] in place, then out = rms_norm(residual) (R55, R56)."""
        ...

    def linear(self, x: Array, weight: Linear, out: Array) -> None:
        """out[T, N] = x[T, K] @ weight[N, K]^T; one accumulation chain over K per element."""
        ...

    def linear_silu_and_mul(self, x: Array, gate_up_proj: Linear, out: Array) -> None:
        """out[T, I] = silu(gate_up[:, :I]) * gate_up[:, I:] (R58), where gate_up [T, 2 I], in
        out's dtype, is to the bit what linear() makes of x[T, K] and gate_up_proj [2 I, K].
        """
        ...

    def lm_head(
        self, x: Array, weight: Linear, argmax_only: Array, logits: Array, best: Array
    ) -> None:
        """logits[S, V] float32 = x[S, K] @ weight[V, K]^T, to the bit as linear() does it, and
        best[S] int32 = -1; but in rows where argmax_only [S] int32 is 1, not 0, best[S] = the
        token with the largest logit, and their logits are not written.

        NaNs are passed over; of equals the lowest token counts. Where no logit is above -inf there
        is no such token: the row's logits are written as -inf, and best is -1.
        """
        ...

    def rotary_embedding(
        self, positions: Array, query: Array, key: Array, cos_sin_cache: Array
    ) -> None:
        """Rotate query [T, NH, D] and key [T, KH, D] in place, halves against halves (R39).

        cos_sin_cache [max_position, rotary_dim] float32: first half cosines, second half sines.
        """
        ...

    def reshape_and_cache(
        self, key: Array, value: Array, kv_cache: KVCache, layer: int, slot_mapping: Array
    ) -> None:
        """Scatter key, value [T, KH, D] into slots slot_mapping[T] of one layer (R25, R38)."""
        ...

    def paged_attention(
        self,
        query: Array,
        kv_cache: KVCache,
        layer: int,
        block_table: Array,
        query_start_loc: Array,
        seq_lens: Array,
        scale: float,
        out: Array,
    ) -> None:
        """Causal attention of query [T, NH, D] over paged K/V; prefill and decode alike (R49).

        Request b owns rows query_start_loc[b] : query_start_loc[b + 1] [B + 1]; its last row
        attends to seq_lens[b] keys, the row before to one fewer, and so on. block_table is
        [B, max_num_blocks], -1 past the end. out [T, NH * D]. Online softmax over tiles of keys
        fixed relative to position 0 (FlashAttention; Flash-Decoding merges splits in order).
        """
        ...

    def gather_rows(self, x: Array, indices: Array, out: Array) -> None:
        """out[S, H] = x[indices[S]]; taken before the LM head (R61)."""
        ...


BACKENDS = {"reference": ".reference", "cpu": ".cpu"}


def load_backend(
    name: str,
    *,
    threads: int | None = None,
    isa: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    packed_cache: str = "off",
    huge_pages: bool = True,
) -> Kernels:
    """Import one backend and make its op table; nothing else is imported. Raises ConfigError.

    packed_cache, huge_pages: as the settings of these names; a backend may have no use for them.
    """
    if name not in BACKENDS:
        raise ConfigError("backend", name, f"one of {', '.join(sorted(BACKENDS))}")
    module = import_module(BACKENDS[name], __package__)
    make_kernels: Callable[..., Kernels] = module.make_kernels
    return make_kernels(
        threads=threads,
        isa=isa,
        dtype=dtype,
        quantization=quantization,
        packed_cache=packed_cache,
        huge_pages=huge_pages,
    )
