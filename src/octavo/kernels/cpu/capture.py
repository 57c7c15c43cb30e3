"""A model's forward, captured once as a list of native calls and replayed by one call a step.

The model's Python stays the definition. It runs once on a step that nobody reads, while a recorder
takes note of each op: which part of the arena, which index array, which weight. A replay lays out
the same arena for any T and S and runs the list natively; the kernels are the same, so are the
bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..api import Arena, Array, Forward, HeadOutput, KVCache, StepBatch
from . import _native


class CaptureError(Exception):
    """The model does something that a list of calls can't repeat."""


class TracingArena:
    """Hands out memory of `arena` and remembers which array is which buffer of the program."""

    def __init__(self, arena: Arena, program: _native.Program, batch: StepBatch) -> None:
        self._arena = arena
        self._program = program
        self._rows = {len(batch.input_ids): False, len(batch.logits_indices): True}
        self.buffers: list[Array] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """As Arena.empty; raises CaptureError where the rows are neither T nor S."""
        array = self._arena.empty(shape, dtype)
        if array.size:
            if shape[0] not in self._rows:
                raise CaptureError(f"an array of {shape[0]} rows is neither of tokens nor samples")
            self._program.add_buffer(self._rows[shape[0]], array.nbytes // shape[0])
            self.buffers.append(array)
        return array

    def reset(self) -> None:
        """A step's memory is given back by who runs it."""
        raise CaptureError("a model must not reset the arena")

    def index_of(self, array: Array) -> tuple[int, int]:
        """The buffer that `array` is a view of, and where it starts, in bytes."""
        at = array.ctypes.data
        for index, buffer in enumerate(self.buffers):
            offset = at - buffer.ctypes.data
            if 0 <= offset < buffer.nbytes and len(array) == len(buffer):
                return index, offset
        raise CaptureError("an op was given an array that is not from the arena")


class Recorder:
    """Stands in for the native ops: runs each, which checks it, and adds it to the program."""

    def __init__(self, ops: _native.Ops, arena: TracingArena, program: _native.Program,
                 batch: StepBatch) -> None:  # fmt: skip
        self._ops = ops
        self._arena = arena
        self._program = program
        self._inputs = list(batch)
        self.kept: list[object] = []
        """Weights that the program points to."""

    def _view(self, array: Array) -> _native.View:
        buffer, offset = self._arena.index_of(array)
        strides = [stride // array.itemsize for stride in array.strides]
        return _native.view(buffer, offset, array.shape, strides, array.itemsize == 2)

    def _input(self, array: Array) -> int:
        for index, each in enumerate(self._inputs):
            if each is array:
                return index
        raise CaptureError("an op was given an index array that is not the step's")

    def _add(
        self,
        op: _native.Op,
        views: Sequence[Array],
        *,
        weight: object = None,
        constant: Array | None = None,
        number: float = 0.0,
        layer: int = 0,
        inputs: Sequence[Array] = (),
    ) -> None:
        self.kept += [weight, constant]
        self._program.add(
            op,
            [self._view(array) for array in views],
            weight,
            constant,
            number,
            layer,
            [self._input(array) for array in inputs],
        )

    def embedding(self, input_ids: Array, weight: object, out: Array) -> None:
        self._ops.embedding(input_ids, weight, out)
        self._add(_native.Op.embedding, [out], weight=weight, inputs=[input_ids])

    def linear(self, x: Array, weight: object, out: Array) -> None:
        self._ops.linear(x, weight, out)
        self._add(_native.Op.linear, [out, x], weight=weight)

    def linear_silu_and_mul(self, x: Array, gate_up_proj: object, out: Array) -> None:
        self._ops.linear_silu_and_mul(x, gate_up_proj, out)
        self._add(_native.Op.linear_silu_and_mul, [out, x], weight=gate_up_proj)

    def lm_head(
        self, x: Array, weight: object, argmax_only: Array, logits: Array, best: Array
    ) -> None:
        self._ops.lm_head(x, weight, argmax_only, logits, best)
        views = [logits, x, best[:, None]]
        self._add(_native.Op.lm_head, views, weight=weight, inputs=[argmax_only])

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        self._ops.rms_norm(x, weight, eps, out)
        self._add(_native.Op.rms_norm, [out, x], constant=weight, number=eps)

    def fused_add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        self._ops.fused_add_rms_norm(x, residual, weight, eps, out)
        op = _native.Op.fused_add_rms_norm
        self._add(op, [out, x, residual], constant=weight, number=eps)

    def rotary_embedding(self, positions: Array, query: Array, key: Array, table: Array) -> None:
        self._ops.rotary_embedding(positions, query, key, table)
        op = _native.Op.rotary_embedding
        self._add(op, [query, query, key], constant=table, inputs=[positions])

    def reshape_and_cache(
        self, key: Array, value: Array, kv_cache: object, layer: int, slot_mapping: Array
    ) -> None:
        self._ops.reshape_and_cache(key, value, kv_cache, layer, slot_mapping)
        op = _native.Op.reshape_and_cache
        self._add(op, [key, key, value], layer=layer, inputs=[slot_mapping])

    def paged_attention(
        self,
        query: Array,
        kv_cache: object,
        layer: int,
        block_table: Array,
        query_start_loc: Array,
        seq_lens: Array,
        scale: float,
        out: Array,
    ) -> None:
        self._ops.paged_attention(
            query, kv_cache, layer, block_table, query_start_loc, seq_lens, scale, out
        )
        inputs = [block_table, query_start_loc, seq_lens]
        op = _native.Op.paged_attention
        self._add(op, [out, query], number=scale, layer=layer, inputs=inputs)

    def gather_rows(self, x: Array, indices: Array, out: Array) -> None:
        self._ops.gather_rows(x, indices, out)
        self._add(_native.Op.gather_rows, [out, x], inputs=[indices])


class Captured:
    """One program, and where it leaves what its head found."""

    def __init__(
        self, program: _native.Program, recorder: Recorder, arena: TracingArena, found: HeadOutput
    ) -> None:
        """found: what the traced step gave."""
        if not len(program):
            raise CaptureError("the model computes with other kernels than these")
        self.program = program
        self._kept = recorder.kept
        self._parts = [
            (arena.index_of(array)[0] if array.size else 0, array.shape[1:], array.dtype)
            for array in found
        ]

    def run(
        self, ops: _native.Ops, batch: StepBatch, kv_cache: KVCache, arena: Arena
    ) -> HeadOutput:
        """Logits and best tokens in the arena's memory; empty arrays for S = 0."""
        num_tokens, num_samples = len(batch.input_ids), len(batch.logits_indices)
        starts = self.program.layout(num_tokens, num_samples)
        memory = arena.empty((starts[-1],), np.uint8)
        ops.replay(self.program, num_tokens, num_samples, list(batch), kv_cache, memory)

        def part(buffer: int, columns: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            shape = (num_samples, *columns)
            rows = memory[starts[buffer] :][: math.prod(shape) * dtype.itemsize]
            return rows.view(dtype).reshape(shape)

        return HeadOutput(*(part(*each) for each in self._parts))


class CapturedForward:
    """A Forward that replays: one program for steps that sample, one for those that don't."""

    def __init__(self, ops: _native.Ops, forward: Forward, programs: dict[bool, Captured]) -> None:
        self._ops = ops
        self._forward = forward
        self.programs = programs

    def __call__(self, batch: StepBatch, kv_cache: KVCache, arena: Arena) -> HeadOutput:
        """As the model's forward, to the bit."""
        captured = self.programs.get(len(batch.logits_indices) > 0)
        if captured is None or any(not isinstance(field, np.ndarray) for field in batch):
            return self._forward(batch, kv_cache, arena)
        return captured.run(self._ops, batch, kv_cache, arena)
