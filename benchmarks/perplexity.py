"""Perplexity of a fixed text by how the weights are kept, next to the same weights in float32.

    python benchmarks/perplexity.py [MODEL] [--formats Q8_0,Q4_0,Q4_K] [--isa LEVEL]

The text is perplexity.txt, in windows of 1,024 tokens that are each predicted from their own start.
float32 is the model's weights dequantised. Each format named with --formats is made from those
weights by the gguf package (of the development packages) or k_quants.py, and compared with its own
dequantised float32 values; int8 with bfloat16. Where rows aren't whole blocks of 256, Q4_K becomes
Q5_0, Q5_K becomes Q5_1 and Q6_K becomes Q8_0, and the embedding Q8_0, as in model files.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from k_quants import quantise_k

from octavo.checkpoint import Checkpoint, StoredRows, Weights
from octavo.engine.tokenizer import Tokenizer
from octavo.kernels.api import Array, load_backend
from octavo.models.batch import ForwardBatch
from octavo.models.registry import build_model
from octavo.weights.sources import open_checkpoint

TEXT = Path(__file__).with_suffix(".txt")
WINDOW = 1024
BLOCK_SIZE = 16
EMBEDDING = "model.embed_tokens.weight"


# Of rows that are no whole number of blocks.
INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


class Requantised:
    """The Weights protocol over other weights, with every linear one brought to one format."""

    def __init__(self, weights: Weights, kind: str, embedding: str) -> None:
        self._weights = weights
        self._kind = kind
        self._embedding = embedding
        self.names, self.shape, self.release = weights.names, weights.shape, weights.release

    def load(self, name: str, *, out: Array | None = None) -> Array:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.load_stored(name, frozenset({self._kind_of(name)}))
        if stored is None:
            return self._weights.load(name, out=out)
        values = dequantize(stored.rows, GGMLQuantizationType[stored.kind])
        out = np.empty(self.shape(name), np.float32) if out is None else out
        out[:] = values
        return out

    def load_stored(self, name: str, kinds: frozenset[str]) -> StoredRows | None:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import quantize

        kind = self._kind_of(name)
        if kind not in kinds or len(self.shape(name)) != 2:
            return None
        values = self._weights.load(name)
        if kind in INSTEAD:
            return StoredRows(kind, quantise_k(values, kind))
        return StoredRows(kind, quantize(values, GGMLQuantizationType[kind]))

    def _kind_of(self, name: str) -> str:
        if name == self._embedding and self._kind in INSTEAD:
            return "Q8_0"
        whole = self.shape(name)[-1] % 256 == 0
        return self._kind if whole else INSTEAD.get(self._kind, self._kind)


def perplexity(checkpoint: Checkpoint, token_ids: list[int], **settings: Any) -> float:
    """exp of the mean negative log likelihood over all windows, their first tokens left out."""
    kernels = load_backend("cpu", **settings)
    model = build_model(checkpoint, kernels, max_model_len=WINDOW)
    arena, config = kernels.make_arena(), checkpoint.config
    kv_cache = kernels.allocate_kv_cache(
        num_layers=config.num_hidden_layers,
        num_blocks=WINDOW // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    total, count = 0.0, 0
    for start in range(0, len(token_ids), WINDOW):
        ids = token_ids[start : start + WINDOW]
        positions = np.arange(len(ids), dtype=np.int32)
        batch = ForwardBatch(
            input_ids=np.array(ids, np.int32),
            positions=positions,
            slot_mapping=positions,
            query_start_loc=np.array([0, len(ids)], np.int32),
            seq_lens=np.array([len(ids)], np.int32),
            block_table=np.arange(WINDOW // BLOCK_SIZE, dtype=np.int32)[None, :],
            logits_indices=positions,
            argmax_only=np.zeros(len(ids), np.int32),
        )
        arena.reset()
        logits = model.forward(batch, kv_cache, arena).logits
        for row, token in zip(logits, ids[1:], strict=False):
            top = float(row.max())
            total += (
                top + float(np.log(np.exp(row - top).sum(dtype=np.float64))) - float(row[token])
            )
            count += 1
    return float(np.exp(total / count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument(
        "--formats", default="", help="Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
    )
    parser.add_argument("--isa", help="instruction set of the kernels; the best by default")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    token_ids = Tokenizer(checkpoint.tokenizer).encode(TEXT.read_text())
    print(f"{checkpoint.name}: {len(token_ids):,} tokens, windows of {WINDOW:,}", flush=True)

    def show(name: str, value: float, base: float, of: str) -> None:
        print(f"  {name:<22} {value:9.4f}  {value / base - 1:+7.3%} against {of}", flush=True)

    def measure(checkpoint: Checkpoint, **settings: Any) -> float:
        return perplexity(checkpoint, token_ids, isa=args.isa, **settings)

    base = measure(checkpoint, dtype="float32")
    print(f"  {'float32':<22} {base:9.4f}", flush=True)
    half = measure(checkpoint, dtype="bfloat16")
    show("bfloat16", half, base, "float32")
    show("int8", measure(checkpoint, quantization="int8"), half, "bfloat16")
    show("stored", measure(checkpoint, quantization="stored"), base, "float32")
    for kind in filter(None, args.formats.split(",")):
        other = replace(checkpoint, weights=Requantised(checkpoint.weights, kind, EMBEDDING))
        own = measure(other, dtype="float32")
        kept = measure(other, quantization="stored")
        show(f"{kind} stored", kept, own, f"its own float32 ({own:.4f})")


if __name__ == "__main__":
    main()
