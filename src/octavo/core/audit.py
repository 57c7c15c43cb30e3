"""Recount a whole scheduler from scratch: after every step in tests, when idle in production."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..request import Status

if TYPE_CHECKING:
    from ..request import Request
    from .scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """Assert every invariant that ties requests, rows and blocks together."""
    _audit_requests(scheduler)
    _audit_blocks(scheduler)
    if not scheduler.requests and not scheduler.in_flight:
        kv = scheduler.kv
        assert kv.num_available == kv.pool.num_blocks, "blocks are in use though nothing runs"


def _audit_requests(scheduler: Scheduler) -> None:
    waiting = {request.request_id: request for request in scheduler.waiting}
    running = scheduler.running
    assert len(waiting) == len(scheduler.waiting), "a request waits twice"
    assert not waiting.keys() & running.keys(), "a request both waits and runs"
    assert waiting.keys() | running.keys() == scheduler.requests.keys(), "a request was lost"
    journal = scheduler.journal
    assert journal.waiting_for.keys() <= waiting.keys(), "a request is held that does not wait"
    preempted = {key for key, request in waiting.items() if request.status is Status.PREEMPTED}
    assert journal.num_dropped.keys() == preempted, "preempted requests are miscounted"
    for request in waiting.values():
        assert request.status in (Status.WAITING, Status.PREEMPTED), f"{request} in the queue"
        assert not request.block_ids, f"{request} waits and holds blocks"
        assert request.row is None, f"{request} waits and holds a row"
        assert request.num_computed_tokens == 0, f"{request} claims computed tokens"
        swapped = request.swapped
        assert swapped is None or request.status is Status.PREEMPTED, f"{request} never ran"
    for request in running.values():
        assert request.status is Status.RUNNING, f"{request} among the running"
        # The last known token is computed when the next is sampled, so one is always behind.
        assert request.num_computed_tokens < request.num_tokens, f"{request} has nothing to do"
        num_most = request.num_tokens + int(request.params.max_tokens != 0)
        assert num_most <= scheduler.limits.max_model_len, f"{request} is too long"
        assert request.num_output_tokens < request.max_tokens, f"{request} goes on too long"
    rows = [-1 if request.row is None else request.row for request in _holders(scheduler)]
    assert sorted([*rows, *scheduler.free_rows]) == list(range(scheduler.config.max_num_seqs)), (
        "a row is lost or has two owners"
    )


def _holders(scheduler: Scheduler) -> list[Request]:
    """Who may hold a row and blocks: the running, and the finished in flight or as padding."""
    in_flight = [request for group in scheduler.in_flight.values() for request in group]
    ended = {request for request in in_flight if request.status is Status.FINISHED}
    return [*scheduler.running.values(), *(ended | scheduler.batching.padding.keys())]


def _audit_blocks(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    holders = _holders(scheduler)
    kv.check(holders, scheduler.waiting)
    for request in holders:
        num_blocks = len(request.block_ids)
        assert num_blocks >= kv.num_blocks_for(request.num_computed_tokens), f"{request} lost some"
        assert num_blocks <= kv.num_blocks_for(request.num_tokens), f"{request} holds too many"
    used = {block_id for request in holders for block_id in request.block_ids}
    pinned = [node for node in kv.cache.nodes() if node.pins and not node.in_tier]
    used |= {block_id for node in pinned for block_id in node.block_ids}
    total = kv.pool.num_free + kv.cache.num_evictable + len(used)
    assert total == kv.pool.num_blocks, "free, evictable and used blocks do not add up"
