"""Composition root of the engine: the one place where all rooms are wired together."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..checkpoint import Checkpoint, GenerationDefaults
from ..config import EngineConfig, must_fit
from ..core.scheduler import Scheduler
from ..errors import ModelLoadError
from ..trace.record import RecordingFile, RecordingScheduler
from ..weights.sources import open_checkpoint, repairable
from ..worker.executor import Executor
from ..worker.load import load_executor
from .engine_core import EngineCore
from .grammar import Grammars
from .input_processor import InputProcessor
from .metrics import Metrics, Unwatched
from .tokenizer import Tokenizer

logger = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to step, and what its front ends need to know."""

    core: EngineCore
    inputs: InputProcessor
    tokenizer: Tokenizer
    generation: GenerationDefaults
    metrics: Metrics
    model_name: str
    max_model_len: int
    load_seconds: float


def make_scheduler(config: EngineConfig, executor: Executor) -> Scheduler:
    """A scheduler, recording if asked to. Raises ConfigError if that can't be written."""
    make = Scheduler
    if config.record is not None:
        file, hashed = RecordingFile(config.record), config.record_hashes
        make = partial(  # type: ignore[assignment]
            RecordingScheduler, write=file.write, close=file.close, hashed=hashed
        )
    num_blocks = executor.num_kv_blocks
    with must_fit("num_kv_blocks", num_blocks, "a list of so many (set kv_cache_memory)"):
        return make(
            config.scheduler,
            config.cache,
            num_blocks=num_blocks,
            max_model_len=executor.max_model_len,
            num_slots=executor.num_tier_slots,
            costs=executor.costs,
        )


def build_engine(config: EngineConfig, *, progress: bool = True, scraped: bool = True) -> Engine:
    """Find the model, load it, and connect scheduler, executor and text.

    scraped: whether somebody reads the metrics.

    Raises ModelLoadError for a model that can't be had and ConfigError for impossible settings.
    """
    start = time.monotonic()
    checkpoint = open_checkpoint(config.model, progress=progress)
    # Reading weights mostly waits for memory, not for us.
    with repairable(config.model), ThreadPoolExecutor(1) as pool:
        building = pool.submit(_build_tokenizer, checkpoint)
        executor = load_executor(config, checkpoint)
        tokenizer = building.result()
    scheduler = make_scheduler(config, executor)
    metrics: Any = Unwatched()
    if scraped:
        from ..trace.tier_metrics import TierCollector

        metrics = Metrics(checkpoint.name)
        metrics.registry.register(TierCollector(scheduler.event_log, executor, metrics.labels))
    sampling = config.sampling_defaults(checkpoint.generation.sampling)
    generation = replace(checkpoint.generation, sampling=sampling)
    eos_token_ids = generation.eos_token_ids
    grammars = Grammars(
        tokenizer,
        vocab_size=executor.vocab_size,
        eos_token_ids=eos_token_ids,
        jump_forward=config.scheduler.jump_forward,
    )
    core = EngineCore(scheduler, executor, tokenizer, metrics, grammars=grammars)
    if config.cache.prefix_cache_file is not None:
        core.prefixes.begin(config.cache.prefix_cache_file, config.cache.prefix_cache_save_seconds)
    inputs = InputProcessor(
        tokenizer,
        scheduler.limits,
        generation,
        vocab_size=executor.vocab_size,
        seed=config.seed,
        check=executor.check,
    )
    for name, value in executor.describe().items():
        logger.info("%s: %s", name, value)
    logger.info("gap between tokens: %s", config.scheduler.token_gap)
    return Engine(
        core=core,
        inputs=inputs,
        tokenizer=tokenizer,
        generation=generation,
        metrics=metrics,
        model_name=checkpoint.name,
        max_model_len=executor.max_model_len,
        load_seconds=time.monotonic() - start,
    )


def _build_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    try:
        return Tokenizer(checkpoint.tokenizer)
    except ModelLoadError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
