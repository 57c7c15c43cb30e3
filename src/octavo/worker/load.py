"""From settings and a checkpoint to an executor that is ready for its first step."""

from __future__ import annotations

from functools import cache

from ..checkpoint import Checkpoint
from ..config import EngineConfig, must_fit
from ..errors import ConfigError
from ..kernels.api import Kernels, load_backend
from ..models.batch import trace_batches
from ..models.registry import Model, build_model
from .input_batch import InputBatch
from .kv_storage import KVStorage
from .local import LocalExecutor
from .model_runner import ModelRunner
from .prefix_file import fingerprint
from .tiers import Tiers


def load_executor(config: EngineConfig, checkpoint: Checkpoint) -> LocalExecutor:
    """Load backend, weights and KV pool. Raises ConfigError, ModelLoadError."""
    from ..sampling.native import make_sampler
    from ..sampling.state import RowState

    max_model_len = resolve_max_model_len(config, checkpoint)
    backend = config.backend
    kernels = load_backend(backend.backend, **backend.kernel_settings())
    max_num_seqs = config.scheduler.max_num_seqs
    storage = KVStorage(  # before the weights: what is refused is refused at once
        checkpoint.config,
        config.cache,
        kernels,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    tiers = Tiers(config.cache, storage.kv_cache)
    with must_fit("max_num_seqs", max_num_seqs, f"so many rows of {max_model_len} tokens"):
        rows = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.cache.block_size,
        )
    with kernels.open_packed(checkpoint):
        model = build_model(
            checkpoint,
            kernels,
            max_model_len=max_model_len,
            prune_last_layer=backend.prune_last_layer,
        )
    captured = None
    if not backend.enforce_eager:
        captured = kernels.capture(model.forward, storage.kv_cache, trace_batches())
    runner = ModelRunner(
        model,
        tiers,
        kernels.make_arena(),
        rows,
        sampler=make_sampler(model.config.vocab_size, kernels.sampling),
        new_row_state=RowState,
        forward=captured,
    )
    report = describe(checkpoint, kernels, model, storage)
    report["steps"] = "computed by the model's Python" if captured is None else "replayed"
    if sum(tiers.num_slots):
        report["tiers"] = tiers.describe()
    return LocalExecutor(
        runner,
        max_model_len=max_model_len,
        report=report,
        # Asked for at the start, and kept: by the end another model may have this one's path.
        fingerprint=cache(lambda: fingerprint(config, checkpoint, kernels, model)),
    )


def resolve_max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Longest request in tokens: what is asked for, at most what the model was trained for."""
    trained = checkpoint.config.max_position_embeddings
    wanted = config.scheduler.max_model_len
    if wanted is None:
        return trained
    if wanted > trained:
        raise ConfigError(
            "max_model_len", wanted, f"at most {trained}, which {checkpoint.name} was trained for"
        )
    return wanted


def describe(
    checkpoint: Checkpoint, kernels: Kernels, model: Model, storage: KVStorage
) -> dict[str, str]:
    """The start-up report, in the order it is read."""
    config, rope = checkpoint.config, model.cos_sin_cache
    return {
        "model": checkpoint.name,
        **kernels.describe(),
        "weights": f"{model.weight_bytes / 2**20:,.0f} MiB",
        "KV pool": storage.describe(),
        "rotary cache": f"{rope.shape[0]:,} positions, {rope.nbytes / 2**20:.1f} MiB",  # (R41)
        "shape": (  # (R60)
            f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, "
            f"{config.num_attention_heads} heads, {config.num_key_value_heads} K/V heads, "
            f"MLP {config.intermediate_size} = "
            f"{config.intermediate_size / config.hidden_size:.2f} x hidden"
        ),
    }
