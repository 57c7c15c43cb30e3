"""A request as the scheduler sees it: tokens, blocks and a status; no text, no arrays."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from .messages import NewRequest, TokenLogprobs
from .sampling_params import SamplingParams


class Status(Enum):
    """Life cycle (R92): WAITING -> RUNNING -> FINISHED, and RUNNING -> PREEMPTED -> RUNNING.

    Prefill and decode are no states: they are how far computed tokens are behind known ones.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Swapped(NamedTuple):
    """Where the K/V of a preempted request are kept."""

    slots: list[int]
    """Of the tier, a block each."""
    num_tokens: int
    """So many were computed."""


class Request:
    """Mutable; owned by the scheduler from `add` until it finishes."""

    __slots__ = (
        "arrival_time",
        "block_ids",
        "cache_scope",
        "eos_token_ids",
        "finish_reason",
        "leader",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_passed_by",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "priority",
        "prompt_logprobs",
        "rank",
        "request_id",
        "row",
        "seed",
        "status",
        "swapped",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_scope: str = "",
        leader: Request | None = None,
        tenant: str = "",
    ) -> None:
        self.request_id = request_id
        """Unique, in order of arrival: also the tie-break of every order."""
        self.token_ids = list(prompt_token_ids)
        """Prompt, then generated."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.max_tokens = max_tokens
        """Resolved: params.max_tokens, or what the limits leave."""
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.priority = priority
        self.rank = 0
        """Order by priority and age, lower first; the waiting order sets it at the door."""
        self.tenant = tenant
        """Who pays for it, under fair_share."""
        self.arrival_time = arrival_time
        self.cache_scope = cache_scope
        """Part of the prefix cache's key: no hits across scopes."""
        self.leader = leader
        """The first of the n answers to one prompt, for the others: it computes the prompt."""

        self.status = Status.WAITING
        self.num_computed_tokens = 0
        """Tokens whose K/V exist, prefix hits included (R4)."""
        self.num_cached_tokens = 0
        """Of these, found in the prefix cache at the first admission (never own recomputes, and
        never what the first of n answers computed for the others)."""
        self.num_preemptions = 0
        self.num_passed_by = 0
        """Requests that were admitted past this one while it did not fit (skip_limit)."""
        self.block_ids: list[int] = []
        self.swapped: Swapped | None = None
        """While it is preempted and its K/V are kept."""
        self.row: int | None = None
        self.finish_reason: str | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of prompt tokens 1, 2, ... as far as they are known, if params asks for them."""

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that may come from the prefix cache: at least one is computed, to sample from
        it (C4); and where prompt logprobs are still missing, all that they come from (C43)."""
        most = len(self.token_ids) - 1
        num_known = len(self.prompt_logprobs)
        if self.params.prompt_logprobs is None or num_known == self.num_prompt_tokens - 1:
            return most
        return min(most, num_known)

    def take_scores(self) -> None:
        """Those that the first of n answers has found: the prompt is scored once."""
        if self.leader is not None and len(self.leader.prompt_logprobs) > len(self.prompt_logprobs):
            self.prompt_logprobs = list(self.leader.prompt_logprobs)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def start_message(self) -> NewRequest:
        """All that the worker has to know when this request starts or resumes in its row."""
        assert self.row is not None
        return NewRequest(
            self.row,
            self.request_id,
            tuple(self.token_ids),
            self.num_prompt_tokens,
            self.params,
            self.seed,
            self.eos_token_ids,
            len(self.prompt_logprobs),
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens}, "
            f"{len(self.block_ids)} blocks)"
        )
