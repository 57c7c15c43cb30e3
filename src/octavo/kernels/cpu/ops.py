"""The op table over the native module: views, no copies. Shapes are checked by the bindings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import ml_dtypes
import numpy as np

from ...checkpoint import Checkpoint, StoredRows
from ...errors import ConfigError
from ..api import Arena, Array, Forward, KVCache, Linear, SamplingKernels, StepBatch
from ..arena import NumpyArena
from . import _native
from .capture import Captured, CapturedForward, CaptureError, Recorder, TracingArena
from .packed import PackedCache
from .pages import describe_huge_pages

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_BITS = np.dtype(np.uint16)
PLAIN = frozenset({"F32", "F16", "BF16"})
PANEL = 32
"""Output columns that lie together in a packed weight (kPanel of csrc/common.hpp)."""


def resolve_dtype(dtype: str) -> np.dtype[Any]:
    """numpy dtype of activations: "auto" and "bfloat16", or "float32". Raises ConfigError."""
    if dtype in ("auto", "bfloat16"):
        return BFLOAT16
    if dtype == "float32":
        return FLOAT32
    raise ConfigError("dtype", dtype, "auto, bfloat16 or float32 on the cpu backend")


def _raw(x: Array) -> Array:
    """`x` as the bindings take it: the buffer protocol knows no bfloat16, so its bits."""
    return x.view(_BITS) if x.dtype == BFLOAT16 else x


class CpuKernels:
    """kernels.api.Kernels on the CPU, at one instruction-set level and one dtype."""

    name = "cpu"

    def __init__(
        self,
        level: str,
        dtype: np.dtype[Any],
        *,
        quantization: str | None = None,
        packed_cache: str = "off",
    ) -> None:
        """quantization "int8": quantise what pack_linear gets; "stored": keep a file's formats.

        "auto" keeps those formats, and widens what is plain numbers.
        """
        self.isa = level
        self.dtype: Any = dtype
        self.kv_cache_dtypes = (str(dtype), "int8")
        self._keeps_stored = quantization in ("auto", "stored")
        self._widened = PLAIN if quantization == "auto" else frozenset()
        refused = PLAIN if quantization == "stored" else frozenset()
        self.stored_kinds = frozenset(_native.stored_kinds()) - refused
        self._int8 = quantization == "int8"
        self._packed_kinds: set[str] = set()
        self._packing = (level, str(dtype), quantization)
        self._packed_cache = packed_cache
        self._packed: PackedCache | None = None
        native = _native.Ops(level, dtype == FLOAT32)
        self._ops: _native.Ops | Recorder = native
        self.sampling: SamplingKernels | None = native

    def describe(self) -> dict[str, str]:
        """What runs, for the start-up report."""
        return {
            "backend": self.name,
            "isa": self.isa,
            "threads": str(_native.num_threads()),
            "dtype": str(self.dtype),
            "huge pages": describe_huge_pages(),
            "weight format": ", ".join(sorted(self._packed_kinds)) or str(self.dtype),
            "packed weights": "not kept" if self._packed is None else self._packed.report,
        }

    def make_arena(self) -> Arena:
        """Scratch memory for a step."""
        return NumpyArena(allocate=_native.fresh_bytes)

    def capture(
        self, forward: Forward, kv_cache: KVCache, batches: Sequence[StepBatch]
    ) -> CapturedForward | None:
        """`forward` as programs, one for each of `batches`; None if it can't be one."""
        ops = self._native_ops()
        programs = {}
        try:
            for batch in batches:
                program = _native.Program()
                arena = TracingArena(self.make_arena(), program, batch)
                recorder = Recorder(ops, arena, program, batch)
                self._ops = recorder
                found = forward(batch, kv_cache, arena)
                programs[found.best.size > 0] = Captured(program, recorder, arena, found)
        except CaptureError:
            return None
        finally:
            self._ops = ops
        return CapturedForward(ops, forward, programs)

    def _native_ops(self) -> _native.Ops:
        assert isinstance(self._ops, _native.Ops), "a capture is going on"
        return self._ops

    def pack_linear(self, weight: Array) -> Linear:
        """float32 [N, K] into panels of 32 output columns, in parallel."""
        if not self._int8:
            self._packed_kinds.add(str(self.dtype))
            return cast(Linear, self._native_ops().pack_linear(weight))
        rows = np.ascontiguousarray(weight, np.float32)
        return self._pack([StoredRows("F32", rows.view(np.uint8))], rows.shape[1])

    def pack_stored(self, parts: Sequence[StoredRows], in_features: int) -> Linear | None:
        """Stored blocks into panels of 32 columns, as they are or decoded, in parallel.

        None for formats that would be kept as they are and meet inside a panel.
        """
        kinds = {part.kind for part in parts}
        whole = all(len(part.rows) % PANEL == 0 for part in parts[:-1])
        if self._keeps_stored and not whole and len(kinds) > 1 and not kinds & PLAIN:
            return None
        return self._pack(parts, in_features)

    def _pack(self, parts: Sequence[StoredRows], in_features: int) -> Linear:
        kinds = [part.kind for part in parts]
        rows = [np.ascontiguousarray(part.rows) for part in parts]
        ops = self._native_ops()
        if self._int8 or (self._keeps_stored and not self._widened.intersection(kinds)):
            self._packed_kinds.update(["int8"] if self._int8 else kinds)
            return cast(Linear, ops.pack_stored(rows, kinds, in_features, self._int8))
        self._packed_kinds.add(str(self.dtype))
        return cast(Linear, ops.pack_widened(rows, kinds, in_features))

    @contextmanager
    def open_packed(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Files of weights as they are packed here, see packed.py."""
        packed = None
        if self._packed_cache != "off":
            self._packed = packed = PackedCache(checkpoint, self._packing, self._packed_cache)
            self._packed_kinds |= packed.kinds
        yield
        if packed is not None:
            packed.close(self._packed_kinds)
        checkpoint.weights.release()

    def pack_once(self, key: str, pack: Callable[[], Linear]) -> Linear:
        """From the file that is open, or pack()."""
        return pack() if self._packed is None else self._packed.linear(key, pack)

    def pack_vector(self, weight: Array) -> Array:
        """A norm weight [H] as a float32 array of its own."""
        return np.array(weight, dtype=np.float32, order="C")

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
        """Map the pool; a page becomes resident when it is first written."""
        return cast(
            KVCache,
            self._native_ops().allocate_kv_cache(
                num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype == "int8"
            ),
        )

    def kv_bytes_per_token(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "auto"
    ) -> int:
        """Bytes of the pool that one token takes, over all layers (head_dim padded to 16)."""
        return self._native_ops().kv_bytes_per_token(
            num_layers, num_kv_heads, head_dim, dtype == "int8"
        )

    def embedding(self, input_ids: Array, weight: Linear, out: Array) -> None:
        """out[T, H] float32 = rows of the packed weight [V, H]."""
        self._ops.embedding(input_ids, weight, out)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out[T, H] = x * rsqrt(mean(x^2) + eps) * weight."""
        self._ops.rms_norm(_raw(x), weight, eps, _raw(out))

    def fused_add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        """residual[T, H] += x, then out = rms_norm(residual)."""
        self._ops.fused_add_rms_norm(_raw(x), residual, weight, eps, _raw(out))

    def linear(self, x: Array, weight: Linear, out: Array) -> None:
        """out[T, N] = x[T, K] @ weight[N, K]^T."""
        self._ops.linear(_raw(x), weight, _raw(out))

    def linear_silu_and_mul(self, x: Array, gate_up_proj: Linear, out: Array) -> None:
        """out[T, I] = silu(gate) * up of x[T, K] @ gate_up_proj[2 I, K]^T in out's dtype."""
        self._ops.linear_silu_and_mul(_raw(x), gate_up_proj, _raw(out))

    def lm_head(
        self, x: Array, weight: Linear, argmax_only: Array, logits: Array, best: Array
    ) -> None:
        """As linear, but rows of which only the argmax is wanted leave that alone, in `best`."""
        self._ops.lm_head(_raw(x), weight, argmax_only, _raw(logits), best)

    def rotary_embedding(
        self, positions: Array, query: Array, key: Array, cos_sin_cache: Array
    ) -> None:
        """Rotate query [T, NH, D] and key [T, KH, D] in place."""
        self._ops.rotary_embedding(positions, _raw(query), _raw(key), cos_sin_cache)

    def reshape_and_cache(
        self, key: Array, value: Array, kv_cache: KVCache, layer: int, slot_mapping: Array
    ) -> None:
        """Write key, value [T, KH, D] into their slots of one layer."""
        self._ops.reshape_and_cache(_raw(key), _raw(value), kv_cache, layer, slot_mapping)

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
        """Causal attention of query [T, NH, D] over paged K/V into out [T, NH * D]."""
        self._ops.paged_attention(
            _raw(query), kv_cache, layer, block_table, query_start_loc, seq_lens, scale, _raw(out)
        )

    def gather_rows(self, x: Array, indices: Array, out: Array) -> None:
        """out[S, H] = x[indices]."""
        self._ops.gather_rows(_raw(x), indices, _raw(out))
