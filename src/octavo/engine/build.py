"""Composition root of the engine: the one place where all rooms are wired together."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..checkpoint import GenerationDefaults
from ..config import EngineConfig
from ..core.scheduler import Scheduler
from ..weights.sources import open_checkpoint
from ..worker.load import load_executor
from .engine_core import EngineCore
from .input_processor import InputProcessor
from .metrics import Metrics
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


def build_engine(config: EngineConfig, *, progress: bool = True) -> Engine:
    """Find the model, load it, and connect scheduler, executor and text.

    Raises ModelLoadError for a model that can't be had and ConfigError for impossible settings.
    """
    start = time.monotonic()
    checkpoint = open_checkpoint(config.model, progress=progress)
    with ThreadPoolExecutor(1) as pool:  # reading weights mostly waits for memory, not for us
        building = pool.submit(Tokenizer, checkpoint.tokenizer)
        executor = load_executor(config, checkpoint)
        tokenizer = building.result()
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_blocks=executor.num_kv_blocks,
        max_model_len=executor.max_model_len,
    )
    metrics = Metrics(checkpoint.name)
    core = EngineCore(scheduler, executor, tokenizer, metrics)
    inputs = InputProcessor(
        tokenizer,
        scheduler.limits,
        checkpoint.generation,
        vocab_size=executor.vocab_size,
        seed=config.seed,
    )
    for name, value in executor.describe().items():
        logger.info("%s: %s", name, value)
    logger.info("gap between tokens: %s", config.scheduler.token_gap)
    return Engine(
        core=core,
        inputs=inputs,
        tokenizer=tokenizer,
        generation=checkpoint.generation,
        metrics=metrics,
        model_name=checkpoint.name,
        max_model_len=executor.max_model_len,
        load_seconds=time.monotonic() - start,
    )
