"""Same request, same bits: whatever stands beside it and however it is cut (the op table's law)."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.backends import TEST_BACKENDS, backend_settings, kernels_of
from beds.steps import Drive, Sequence, alone_and_whole
from beds.tiny_llama import VARIANTS, make_checkpoint
from octavo.models.registry import Model, build_model

ROOT = Path(__file__).parents[2]

by_backend = pytest.mark.parametrize("backend", TEST_BACKENDS)


@cache
def model_of(backend: str, variant: str) -> Model:
    return build_model(make_checkpoint(variant), kernels_of(backend), max_model_len=256)


@cache
def truth(backend: str, variant: str, length: int, seed: int) -> np.ndarray:
    """Logits [length, V] of one sequence, alone in one step of block_size 16."""
    token_ids = tokens(variant, length, seed)
    return alone_and_whole(model_of(backend, variant), kernels_of(backend), token_ids)


def tokens(variant: str, length: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VARIANTS[variant].vocab_size, length).tolist()


@by_backend
@settings(max_examples=25)
@given(data=st.data())
def test_batched_and_chunked_and_scattered_equals_alone_and_whole(
    backend: str, data: st.DataObject
) -> None:
    """R44, R46, R49: any neighbours, chunk borders, row order, block ids and block_size: one
    answer, to the bit."""
    variant = data.draw(st.sampled_from(["tied", "llama3_rope", "odd_sizes"]))
    block_size = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    block_ids = data.draw(st.permutations(range(num_blocks)))
    drive = Drive(
        model_of(backend, variant),
        kernels_of(backend),
        num_blocks=num_blocks,
        block_size=block_size,
    )
    sequences = []
    for seed, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        sequences.append(Sequence(tokens(variant, length, seed), block_ids[:count]))
        block_ids = block_ids[count:]
    while any(seq.num_computed < len(seq.token_ids) for seq in sequences):
        unfinished = [seq for seq in sequences if seq.num_computed < len(seq.token_ids)]
        chosen = data.draw(st.permutations(unfinished))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        drive.step(
            [
                (seq, data.draw(st.integers(1, len(seq.token_ids) - seq.num_computed)))
                for seq in chosen
            ]
        )
    for seed, seq in enumerate(sequences):
        np.testing.assert_array_equal(
            seq.logits, truth(backend, variant, len(seq.token_ids), seed), strict=True
        )


@by_backend
def test_token_by_token_equals_whole_over_several_splits(backend: str) -> None:
    """Decode equals prefill to the bit, on a sequence long enough for any tile or split."""
    config = VARIANTS["tied"]
    kernels = kernels_of(backend)
    model = build_model(make_checkpoint(config), kernels, max_model_len=1200)
    token_ids = tokens("tied", 1100, seed=3)
    whole = Drive(model, kernels, num_blocks=70)
    seq = Sequence(token_ids, list(range(69)))
    whole.step([(seq, 1100)])
    decode = Drive(model, kernels, num_blocks=300, block_size=4)
    late = Sequence(token_ids, list(range(275)))
    for chunk in (511, 2, 300, 250, *[1] * 37):
        decode.step([(late, chunk)])
    np.testing.assert_array_equal(late.logits, seq.logits, strict=True)


@by_backend
@pytest.mark.parametrize("num_shared", [1, 2, 3])
def test_a_prefix_hit_equals_fresh(backend: str, num_shared: int) -> None:
    """Keys that another request computed serve as well as one's own."""
    model, kernels = model_of(backend, "tied"), kernels_of(backend)
    drive = Drive(model, kernels)
    first = Sequence(tokens("tied", 61, seed=1), [9, 4, 17, 2])
    drive.step([(first, 37)])
    drive.step([(first, 24)])
    token_ids = first.token_ids[: 16 * num_shared] + tokens("tied", 30, seed=2)
    blocks = [*first.block_ids[:num_shared], 30, 31]
    hit = Sequence(token_ids, blocks, num_computed=16 * num_shared)
    drive.step([(hit, 30)])
    fresh = alone_and_whole(model, kernels, token_ids)
    np.testing.assert_array_equal(hit.logits, fresh[16 * num_shared :], strict=True)


THREADS_SCRIPT = """
import hashlib, sys
import numpy as np
from beds.steps import alone_and_whole
from beds.tiny_llama import VARIANTS, make_checkpoint
from dataclasses import replace
from octavo.kernels.api import load_backend
from octavo.models.registry import build_model

name, dtype, threads = sys.argv[1:]
kernels = load_backend(name, dtype=dtype, threads=int(threads) if name == "cpu" else None)
config = replace(
    VARIANTS["untied"], hidden_size=640, intermediate_size=10300, num_hidden_layers=1,
    num_attention_heads=10, num_key_value_heads=5, head_dim=64, vocab_size=5000,
)
model = build_model(make_checkpoint(config), kernels, max_model_len=256)
logits = alone_and_whole(model, kernels, list(range(12)))
assert np.isfinite(logits).all()
print(hashlib.sha256(logits.tobytes()).hexdigest())
"""


@by_backend
def test_the_number_of_threads_changes_no_bit(backend: str) -> None:
    """On layers that are large enough to be worth sharing: 1 thread = 2 threads = 3."""
    digests = set()
    for threads in ("1", "2", "3"):
        blas = {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", THREADS_SCRIPT, *backend_settings(backend).values(), threads],
            env={**os.environ, **blas, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1
