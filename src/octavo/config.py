"""Settings: frozen, checked once, refusing what they do not know.

Every field's docstring is the help text that the command line shows (see `field_docs`).
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from .errors import ConfigError, RequestError
from .sampling_params import SamplingParams

_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
"""What to say of a setting's type, by its annotation; None may be taken beside it."""


def _check_types(config: object) -> None:
    """Raise ConfigError for the first setting that is not of its type: "8" is not 8, true not 1."""
    assert is_dataclass(config)
    for setting in fields(config):
        kind, _, or_none = str(setting.type).partition(" | ")
        value = getattr(config, setting.name)
        if kind == "float" and type(value) is int:  # 3 seconds are 3.0
            continue
        if kind in _KINDS and type(value).__name__ != kind and not (or_none and value is None):
            raise ConfigError(setting.name, value, _KINDS[kind])


@contextmanager
def must_fit(name: str, value: object, what: str) -> Iterator[None]:
    """Raise ConfigError where the system refuses the memory that a setting asks for: `what`."""
    try:
        yield
    except MemoryError:
        wanted = f"smaller: the system refuses {what}"
        raise ConfigError(name, value, wanted) from None


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(name, value, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens per KV block. A power of two, so kernels can mask instead of divide."""

    num_kv_blocks: int | None = None
    """Blocks in the KV pool. Default: as many as kv_cache_memory holds."""

    kv_cache_memory: int | None = None
    """Bytes for the KV pool (sizes like 512m or 2g on the command line). Default: the larger of
    one request of max_model_len tokens and a quarter of RAM; pages become resident on first use."""

    enable_prefix_caching: bool = True
    """Keep computed prefixes in a radix tree and reuse them for later requests."""

    kv_reservation: str = "paged"
    """How KV blocks are taken: paged (one by one, as tokens come) or contiguous (max_model_len
    tokens per request at its start: a baseline to measure against; without prefix caching)."""

    kv_cache_dtype: str = "auto"
    """Element type of cached K and V: auto (that of the backend), bfloat16, float32, or int8 with
    one scale per token and head (half of bfloat16's memory; answers differ a little)."""

    ram_tier_memory: int = 0
    """Bytes of RAM below the KV pool, for K/V of preempted requests (see preemption_mode) and for
    cached prefixes that would be evicted. 0: none."""

    file_tier_memory: int = 0
    """Bytes of a temporary file below that: when ram_tier_memory is full, what has been there
    longest moves to the file (with 0 bytes of RAM, all goes there). 0: none."""

    file_tier_dir: str | None = None
    """Folder of that file. Default: the system's folder for temporary files."""

    prefix_cache_file: str | None = None
    """File in which cached prefixes outlive the process: read into the tiers (see ram_tier_memory)
    when the engine starts; written when it closes, when a server has been idle for a second, and
    every prefix_cache_save_seconds. It is replaced as a whole, so that a kill at any moment leaves
    the last one; a damaged or foreign file is not used, and a line in the log says so. It holds
    the tokens of prompts and answers, readable by its owner."""

    prefix_cache_save_seconds: float = 300.0
    """Seconds after which a busy engine, too, writes prefix_cache_file; requests wait meanwhile,
    a few seconds for a GiB. 0: only an idle or closing one does."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("ram_tier_memory", "file_tier_memory"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more bytes")
        _require(
            self.file_tier_dir is None or (self.file_tier_dir != "" and self.file_tier_memory > 0),
            "file_tier_dir",
            self.file_tier_dir,
            "used with file_tier_memory: without it there is no file",
        )
        seconds = self.prefix_cache_save_seconds
        in_range = 0 <= seconds < math.inf
        _require(in_range, "prefix_cache_save_seconds", seconds, "0 or more seconds")
        _require(self.prefix_cache_file != "", "prefix_cache_file", "", "the path of a file")
        _require(
            self.prefix_cache_file is None or self.enable_prefix_caching,
            "enable_prefix_caching",
            self.enable_prefix_caching,
            "on with prefix_cache_file: there is nothing to keep else",
        )
        _require(
            1 <= self.block_size <= 65_536 and not self.block_size & (self.block_size - 1),
            "block_size",
            self.block_size,
            "a power of two, at most 65,536",
        )
        _require(
            self.num_kv_blocks is None or self.num_kv_blocks >= 1,
            "num_kv_blocks",
            self.num_kv_blocks,
            "at least 1",
        )
        _require(
            self.kv_cache_memory is None or self.kv_cache_memory >= 1,
            "kv_cache_memory",
            self.kv_cache_memory,
            "at least 1 byte",
        )
        _require(
            self.num_kv_blocks is None or self.kv_cache_memory is None,
            "kv_cache_memory",
            self.kv_cache_memory,
            "unset when num_kv_blocks is set: they size the same pool",
        )
        kinds = ("paged", "contiguous")
        _require(self.kv_reservation in kinds, "kv_reservation", self.kv_reservation,
                 f"one of {', '.join(kinds)}")  # fmt: skip
        _require(
            self.kv_reservation == "paged" or not self.enable_prefix_caching,
            "enable_prefix_caching",
            self.enable_prefix_caching,
            "off with kv_reservation contiguous: reserved blocks can't be shared",
        )
        dtypes = ("auto", "bfloat16", "float32", "int8")
        _require(
            self.kv_cache_dtype in dtypes,
            "kv_cache_dtype",
            self.kv_cache_dtype,
            f"one of {', '.join(dtypes)}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step, and how much of it."""

    max_num_seqs: int = 64
    """Requests that run at the same time."""

    max_num_batched_tokens: int = 2048
    """Token budget of a step, over all requests. May be smaller than max_num_seqs."""

    max_num_scheduled_tokens: int | None = None
    """A tighter budget than max_num_batched_tokens, when set."""

    max_model_len: int | None = None
    """Longest request, prompt and output together. Default: what the model was trained for."""

    enable_chunked_prefill: bool = True
    """Split prompts that do not fit in what is left of a step's budget."""

    scheduling_policy: str = "fcfs"
    """Order of the waiting queue: fcfs (first come, first served), priority, longest_prefix (the
    longest cached prefix first) or fair_share (the tenant that got least first)."""

    priority_order: str = "low_first"
    """Which priority goes first: low_first (0 before 1) or high_first."""

    priority_ageing_steps: int = 0
    """Steps in which a waiting request gains one priority: how long a worse one can be overtaken.
    0: no ageing, so that endless better priorities keep a worse one waiting for ever."""

    overtake_limit: int = 64
    """Under longest_prefix: a request is admitted at most so many places later than by arrival."""

    skip_limit: int = 0
    """Smaller requests that may be admitted past the next one while it does not fit. 0: none."""

    trust_user_field: bool = False
    """Under fair_share: believe the user field of a request, and take it for the tenant. Off: all
    who send the same API key are one tenant."""

    max_num_queued_reqs: int = 4096
    """Requests that may wait to start; the next one is turned away (503). 0: no limit."""

    max_num_queued_tokens: int = 8_388_608
    """Prompt tokens that may wait to start. 0: no limit."""

    max_queue_seconds: float | None = None
    """A request that has not started after so many seconds ends with finish_reason timeout."""

    victim_policy: str = "auto"
    """Who yields its blocks when the pool is short: last_arrived, lowest_priority, most_generated,
    fewest_generated or cheapest (who is quickest to bring back, by measured rates). auto:
    lowest_priority under priority, else last_arrived."""

    preemption_mode: str = "recompute"
    """What happens to the K/V of a preempted request: recompute (dropped, computed again), swap
    (kept in a tier below the pool, see ram_tier_memory), threshold (short ones are recomputed), or
    auto (what measured rates say is quicker). Where the tiers are full: recompute."""

    swap_threshold: int = 128
    """Computed tokens below which preemption_mode threshold recomputes."""

    jump_forward: bool = True
    """Append tokens that a grammar leaves no choice about and compute them together, instead of
    sampling them one by one (the answers are the same). Left alone: requests that ask for logprobs,
    which need the logits of each token, or that set min_tokens, bad_words, allowed_token_ids or
    logits_processors, which might bar one."""

    batching_mode: str = "continuous"
    """When requests join and leave the batch: continuous (in any step), or, as baselines to
    measure against, static (all start and end together, finished rows are computed as padding)
    and static_dropped (finished rows cost nothing but their slot)."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.swap_threshold >= 0, "swap_threshold", self.swap_threshold, "at least 0")
        for name, least in (("max_num_scheduled_tokens", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            _require(value is None or value >= least, name, value, f"at least {least}")
        names = ("priority_ageing_steps", "overtake_limit", "skip_limit")
        for name in (*names, "max_num_queued_reqs", "max_num_queued_tokens"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        seconds = self.max_queue_seconds
        in_range = seconds is None or seconds > 0
        _require(in_range, "max_queue_seconds", seconds, "above 0, or left out")
        orders = ("low_first", "high_first")
        _require(self.priority_order in orders, "priority_order", self.priority_order,
                 f"one of {', '.join(orders)}")  # fmt: skip

    @property
    def victim(self) -> str:
        """The victim policy's name, auto resolved."""
        if self.victim_policy != "auto":
            return self.victim_policy
        return "lowest_priority" if self.scheduling_policy == "priority" else "last_arrived"

    @property
    def token_gap(self) -> str:
        """The promise about the largest gap between two tokens of one answer, in words."""
        return (
            "a running request gets a token in every step unless it is preempted; "
            f"a step computes at most {self.token_budget} tokens, prompts included"
        )

    @property
    def token_budget(self) -> int:
        """Tokens a step may schedule, over all requests (R7)."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return min(self.max_num_scheduled_tokens, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What computes, and in which number format."""

    backend: str = "cpu"
    """Which kernels compute: cpu (C++) or reference (numpy, float32, slow and obvious)."""

    threads: int | None = None
    """Threads of the cpu backend. Default: the cores this process may use."""

    isa: str | None = None
    """Instruction-set level of the cpu backend: amx, avx512_bf16, avx512, avx2 or portable.
    Default: $OCTAVO_ISA, else the best that the machine has."""

    dtype: str = "auto"
    """Number format of weights and activations: bfloat16, float32 or auto (bfloat16 on the cpu
    backend, float32 on reference)."""

    enforce_eager: bool = False
    """Compute each step by the model's Python instead of replaying it as captured at load (the
    answers are the same; replaying is quicker)."""

    prune_last_layer: bool = True
    """Compute no more than K and V of the last layer for prompt tokens whose logits nobody reads
    (the answers are the same; a prompt takes about one layer less)."""

    quantization: str | None = None
    """Compute from quantised weights: int8 (any model, quantised at load, one scale per row of a
    weight) or stored (what a GGUF file holds quantised stays as it is). Activations are quantised,
    too, except for stored on AMX, which computes in bfloat16. Default: weights as dtype says; with
    the dtype auto on AMX stored, because the answers are the same."""

    packed_cache: str = "auto"
    """Keep weights as they are packed in a file beside the models in the cache, so that the next
    start need not pack them: auto (map the file, or copy it where mapped memory is slower to read),
    map, copy or off. `octavo models` lists these files, `octavo models clear` removes them."""

    huge_pages: bool = True
    """Ask the system for huge pages for weights, KV pool and scratch memory of the cpu backend."""

    def kernel_settings(self) -> dict[str, Any]:
        """What kernels.api.load_backend takes besides the backend's name."""
        names = ("threads", "isa", "dtype", "quantization", "packed_cache", "huge_pages")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        _check_types(self)
        ways = ("auto", "map", "copy", "off")
        _require(
            self.packed_cache in ways,
            "packed_cache",
            self.packed_cache,
            f"one of {', '.join(ways)}",
        )
        _require(self.backend in ("cpu", "reference"), "backend", self.backend, "cpu or reference")
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")
        dtypes = ("auto", "bfloat16", "float32")
        _require(self.dtype in dtypes, "dtype", self.dtype, f"one of {', '.join(dtypes)}")
        _require(
            self.dtype != "bfloat16" or self.backend != "reference",
            "dtype",
            self.dtype,
            "auto or float32 with the reference backend",
        )
        _require(
            self.quantization in (None, "int8", "stored"),
            "quantization",
            self.quantization,
            "int8, stored or unset",
        )
        _require(
            self.quantization is None or (self.backend == "cpu" and self.dtype != "float32"),
            "quantization",
            self.quantization,
            "unset with the reference backend and with the dtype float32",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from, besides the model itself."""

    model: str = "smollm2-135m"
    """Model: a .gguf file, a folder in Hugging Face form, a hub id, or an alias."""

    seed: int = 0
    """Seed from which requests without one derive theirs, by arrival number."""

    record: str | None = None
    """Write every input and decision of the scheduler to this file, prompts and answers as token
    ids, for octavo replay. Default: no recording."""

    record_hashes: bool = False
    """With record: instead of token ids, hashes under a key that is kept nowhere. The file then
    tells how long prompts and answers are, when they came and which begin alike, not what they
    say."""

    generation_config: str = "auto"
    """Sampling that a request leaves unsaid: auto (as the model recommends it) or vllm (OpenAI's
    defaults)."""

    override_generation_config: str | None = None
    """A JSON object of sampling defaults that go before those: {"temperature": 0.7}. What a request
    says goes before all. Default: none."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)

    def __post_init__(self) -> None:
        _check_types(self)
        _require(self.record != "", "record", "", "the path of a file")
        _require(
            self.record is not None or not self.record_hashes,
            "record_hashes",
            self.record_hashes,
            "used with record",
        )
        _require(
            self.generation_config in ("auto", "vllm"),
            "generation_config",
            self.generation_config,
            "auto or vllm",
        )
        self.sampling_defaults({})
        has_tier = self.cache.ram_tier_memory or self.cache.file_tier_memory
        _require(
            bool(has_tier) or self.scheduler.preemption_mode not in ("swap", "threshold", "auto"),
            "preemption_mode",
            self.scheduler.preemption_mode,
            "recompute, or set ram_tier_memory (or file_tier_memory): there is no tier to swap to",
        )
        _require(
            bool(has_tier) or self.cache.prefix_cache_file is None,
            "prefix_cache_file",
            self.cache.prefix_cache_file,
            "used with ram_tier_memory or file_tier_memory, into which it is read",
        )
        _require(
            self.cache.kv_reservation == "paged" or not has_tier,
            "kv_reservation",
            self.cache.kv_reservation,
            "paged with ram_tier_memory or file_tier_memory",
        )

    def sampling_defaults(self, recommended: Mapping[str, float]) -> dict[str, Any]:
        """SamplingParams that a request leaves unsaid: the operator's over the model's.

        Raises ConfigError for overrides that are no such parameters.
        """
        text, name = self.override_generation_config, "override_generation_config"
        own = {}
        if text is not None:
            try:
                own = json.loads(text)
                wrong = [key for key in own if key not in _SAMPLING_DEFAULTS]
                valid = isinstance(own, dict) and not wrong
                _require(valid, name, text, f"a JSON object of {', '.join(_SAMPLING_DEFAULTS)}")
                SamplingParams(**own)
            except (ValueError, TypeError, RequestError) as error:
                raise ConfigError(name, text, f"a JSON object: {error}") from error
        return {**(recommended if self.generation_config == "auto" else {}), **own}


_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty",
                      "presence_penalty", "frequency_penalty")  # fmt: skip

PARTS: dict[str, type] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "backend": BackendConfig,
}


TOP = ("model", "seed", "record", "record_hashes", "generation_config",
       "override_generation_config")  # fmt: skip
"""Settings of EngineConfig itself."""


def make_config(**settings: object) -> EngineConfig:
    """An EngineConfig from flat keyword arguments, as LLM(...) and the command line take them.

    Raises ConfigError for a name that no part knows, and TypeError never.
    """
    top: dict[str, object] = {}
    parts: dict[str, dict[str, object]] = {name: {} for name in PARTS}
    for name, value in settings.items():
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if name in TOP:
            top[name] = value
            continue
        for part, cls in PARTS.items():
            if name in {f.name for f in fields(cls)}:
                parts[part][name] = value
                break
        else:
            raise ConfigError(name, value, f"left out: it is no setting; known: {_known()}")
    built = {part: PARTS[part](**values) for part, values in parts.items()}
    return EngineConfig(**top, **built)  # type: ignore[arg-type]


def _known() -> str:
    names = [*TOP, *(name for cls in PARTS.values() for name in field_docs(cls))]
    return ", ".join(names)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a config class, by field name, on one line each."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs
