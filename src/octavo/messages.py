"""What crosses the line between the scheduler (core) and the executor (worker): small, frozen.

A step's plan carries only what changed. The worker keeps, per row, the tokens it knows and a
persistent block-table row; a row is (re)initialised by a NewRequest in `starts`, appended to by
`new_block_ids`, and stays until another NewRequest takes it over. NamedTuples, since a frozen
dataclass costs a microsecond to build and these are on the hot path.
"""

from __future__ import annotations

from typing import NamedTuple

from .sampling_params import SamplingParams


class NewRequest(NamedTuple):
    """A request starts, or resumes after a preemption, in `row`; whatever was there is gone."""

    row: int
    """Row of the worker's persistent state, 0 <= row < max_num_seqs."""

    request_id: int
    token_ids: tuple[int, ...]
    """Every token known now: the prompt, then what was generated before a preemption."""

    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """Resolved 64-bit seed (0 <= seed < 2**64): noise is a hash of (seed, position, token id)."""

    eos_token_ids: tuple[int, ...]
    """The model's end-of-sequence ids (masked by the sampler before min_tokens)."""

    num_prompt_logprobs: int = 0
    """Prompt log probabilities that are known already, of prompt tokens 1, 2, ..., where
    params.prompt_logprobs asks for them."""


class ScheduledRequest(NamedTuple):
    """One request's part of a step: positions [num_computed_tokens, + num_new_tokens)."""

    row: int
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool
    """Whether the last of these positions is the newest known token, so that one is sampled."""

    new_block_ids: tuple[int, ...] = ()
    """Appended to the row's block table; most decode steps need none. At a start: all blocks."""


class Transfer(NamedTuple):
    """One block of K/V, over all layers, that moves."""

    kind: str
    """copy: block to block. store: block to a slot of the tiers. load: slot to block. drop: nobody
    needs what is in the slot `target` (and `source`) any more."""

    source: int
    target: int


class SchedulerOutput(NamedTuple):
    """A step's plan."""

    step: int
    starts: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    num_scheduled_tokens: int
    transfers: tuple[Transfer, ...] = ()
    """Done in this order after the steps before and ahead of all that this one computes, as if
    by one hand: so a block given up here may be given away here (docs/decisions/0003)."""
    masks: tuple[tuple[int, bytes], ...] = ()
    """(row, which tokens may be sampled) of rows under a grammar: bit i % 8, the lowest first, of
    byte i // 8 is token i. A row whose params have a grammar samples nothing without a mask."""
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(row, tokens) that became known without being sampled: appended to what the row knows before
    this step computes."""


class KeptRun(NamedTuple):
    """A run of cached blocks, as the prefix cache outlives a process."""

    scope: str
    parent: int
    """Index of the run that it follows; -1 at the beginning of a prompt."""
    token_ids: tuple[int, ...]
    """Of whole blocks."""
    places: tuple[int, ...]
    """A block of the pool for each of them, or a slot."""
    in_tier: bool


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: raw (R67), before penalties and temperature, or as
    SamplingParams.logprobs_mode says."""

    logprob: float
    """Of the token that stands here; the same bits as its entry in `top`, when it is there."""

    rank: int
    """1 = the most likely."""

    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, best first; ties by id ascending."""

    named: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of SamplingParams.logprob_token_ids, in that order."""


class SampledToken(NamedTuple):
    """What one sampled row produced."""

    row: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class RowFault(NamedTuple):
    """A row that failed (say, its logits were not numbers); it ends alone, the rest go on."""

    row: int
    message: str
    retry: bool = False
    """Only K/V that were kept for it are gone: it may start again and compute them."""
    refused: bool = False
    """What the request asks for contradicts itself; nothing of ours is broken."""


class Moved(NamedTuple):
    """Blocks that a step stored to a tier or loaded from it, together."""

    kind: str
    """As that of a transfer; or demote: RAM to file, which is part of the time of a store."""
    tier: int
    """0 is RAM, 1 the file. A store for which another block had to go to the file counts as 1."""
    num_blocks: int
    us: int


class TierUse(NamedTuple):
    """How full the tiers are, RAM and file, and what was moved since the start."""

    block_nbytes: int
    num_slots: tuple[int, int]
    num_used: tuple[int, int]
    moved: dict[tuple[str, int], tuple[int, float]]
    """Blocks and seconds, by kind and tier as in Moved."""


class ModelCosts(NamedTuple):
    """What moving and computing K/V takes by the book, until it is measured (R101)."""

    block_nbytes: int = 1 << 18
    """Of one block's K/V over all layers. Defaults: a model of 135M parameters in bfloat16."""
    flops_per_token: int = 1 << 28
    """Of a prefill: two for each weight of the layers."""
    bytes_per_us: tuple[float, float] = (25_000.0, 1_000.0)
    """Each way, to RAM (25 GB/s, as over PCIe) and to the file."""
    flops_per_us: float = 500_000.0


SMALL_MODEL = ModelCosts()


class Timing(NamedTuple):
    """What a step took, in microseconds, for estimates."""

    num_tokens: int
    compute_us: int
    moved: tuple[Moved, ...] = ()


class PromptLogprobs(NamedTuple):
    """Log probabilities of the next prompt tokens of one row, in the order of the prompt."""

    row: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(NamedTuple):
    """What a step computed: one SampledToken or RowFault for each scheduled row that samples,
    in the order of the plan; a RowFault may also name a row that samples nothing."""

    step: int
    sampled: tuple[SampledToken, ...]
    faults: tuple[RowFault, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    timing: Timing | None = None


class TokenEvent(NamedTuple):
    """What the scheduler tells the engine about one request after a step."""

    request_id: int
    token_ids: tuple[int, ...]
    """New tokens, a final end-of-sequence or stop id included."""

    logprobs: tuple[TokenLogprobs, ...]
    """One for each new token if asked for, else empty."""

    finish_reason: str | None = None
    """None while it runs; stop, length, abort or error; complete: a grammar's "stop"."""

    stop_reason: int | None = None
    """The stop token id that ended it; None for the model's own end-of-sequence ids."""

    error: str | None = None
    refused: bool = False
    """With an error: the request itself is at fault, as RowFault tells."""
