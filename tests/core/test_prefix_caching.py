"""Prefix caching through the scheduler: what is found, published, shared, and given up."""

from __future__ import annotations

import pytest

from beds.core_bed import CoreBed, alone
from octavo.core.event_log import Reason
from octavo.core.radix_cache import Node


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def children(node: Node) -> list[Node]:
    return sorted(node.children.values(), key=lambda child: child.block_ids)


@pytest.mark.parametrize("length", range(1, 18))
def test_a_fully_cached_prompt_still_computes_a_token(length: int) -> None:
    """C4, R4: sent twice, for each length around a block: same answer, at least one computed."""
    bed = CoreBed()
    first = bed.add(prompt(length), 5)
    bed.run()
    before = len(bed.model.traces)
    second = bed.add(prompt(length), 5)
    bed.step()
    assert bed.model.traces[before].num_new_tokens[second] >= 1
    cached = bed.requests[second].num_cached_tokens
    assert cached == length - 1
    bed.run()
    assert bed.outputs[first] == bed.outputs[second] == alone(prompt(length), 5)


def test_cached_tokens_of_a_prompt_sent_twice() -> None:
    """C65: 40 tokens, block 4: first 0, then 39; also after a preemption of its own."""
    bed = CoreBed()
    bed.add(prompt(40), 3)
    bed.run()
    again = bed.add(prompt(40), 3)
    bed.step()
    bed.scheduler.preempt(again)
    bed.run()
    assert [bed.requests[i].num_cached_tokens for i in range(2)] == [0, 39]
    stats = bed.scheduler.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (80, 39)

    bed = CoreBed()
    bed.add(prompt(40), 3)
    bed.step()
    bed.scheduler.preempt(0)
    bed.run()
    assert bed.requests[0].num_cached_tokens == 0, "own blocks are no hits"


def test_a_shared_prefix_is_computed_once() -> None:
    """R112, R118: three prompts share 20 tokens; the others hit while the first still runs."""
    shared = prompt(20)
    prompts = [shared + prompt(4, i) for i in (1, 2, 3)]
    bed = CoreBed()
    bed.add(prompts[0], 10)
    bed.step()
    bed.add(prompts[1], 10)
    bed.add(prompts[2], 10)
    bed.step()
    assert list(bed.model.traces[1].num_new_tokens.values()) == [1, 4, 4]
    tables = [bed.requests[i].block_ids for i in range(3)]
    assert tables[0][:5] == tables[1][:5] == tables[2][:5]
    counts = bed.scheduler.kv.pool.ref_counts
    assert [counts[i] for i in tables[0][:5]] == [4] * 5, "three tables and the tree (R34)"
    bed.run()
    assert [bed.outputs[i] for i in range(3)] == [alone(p, 10) for p in prompts]


def test_the_tree_of_the_worked_example() -> None:
    """R113, R114: root -> blocks 0-2 -> blocks 3-5 -> leaves 6 (A), 7 (B), 8 (C)."""
    system, shots = prompt(12), prompt(12, 1)
    bed = CoreBed()
    bed.add(system, 1)
    bed.run()
    for i in range(3):
        bed.add(system + shots + prompt(4, 2 + i), 1)
        bed.run()
    assert [bed.requests[i].num_cached_tokens for i in range(4)] == [0, 12, 24, 24]
    (first,) = children(bed.scheduler.kv.cache._roots[""])
    (second,) = children(first)
    assert first.block_ids == [0, 1, 2]
    assert second.block_ids == [3, 4, 5]
    assert [leaf.block_ids for leaf in children(second)] == [[6], [7], [8]]


def test_a_conversation_hits_its_own_answers() -> None:
    """R118: what was generated is cached as well: the next turn computes only what is new."""
    bed = CoreBed()
    turn = prompt(10)
    bed.add(turn, 15)
    bed.run()
    turn = turn + bed.outputs[0] + prompt(6, 1)
    again = bed.add(turn, 5)
    bed.run()
    assert bed.requests[again].num_cached_tokens == 24, "of 25: the last token was never computed"
    assert bed.outputs[again] == alone(turn, 5)


def test_scopes_do_not_share() -> None:
    """C94: equal tokens, another scope: no hit, and no telling that there is one."""
    bed = CoreBed()
    for scope in ("", "x", "y", "x"):
        bed.add(prompt(20), 3, scope=scope)
        bed.run()
    assert [bed.requests[i].num_cached_tokens for i in range(4)] == [0, 0, 0, 19]


def test_twins_leave_one_copy() -> None:
    """C19: two equal prompts in one step; evict one, send a third: it hits valid blocks."""
    bed = CoreBed()
    for _ in range(2):
        bed.add(prompt(16), 10)
    bed.step()
    tables = [bed.requests[i].block_ids for i in range(2)]
    assert not set(tables[0]) & set(tables[1])
    bed.run()
    kv = bed.scheduler.kv
    assert kv.cache.num_blocks == 6, "24 full computed tokens, once"
    assert kv.pool.num_free == 64 - 6
    kv.pool.release(kv.cache.evict(3))
    bed.scheduler.audit()
    third = bed.add(prompt(16), 10)
    bed.run()
    assert bed.requests[third].num_cached_tokens == 12
    assert bed.outputs[0] == bed.outputs[1] == bed.outputs[third] == alone(prompt(16), 10)


def test_twins_that_run_on_share_what_follows() -> None:
    """C19: a twin's later blocks hang below the other's; both stay while the twin runs."""
    bed = CoreBed(num_blocks=40)
    bed.add(prompt(16), 3)
    bed.add(prompt(16), 30)
    for _ in range(20):
        bed.step()
    bed.scheduler.preempt(1)
    bed.run()
    assert bed.outputs[1] == alone(prompt(16), 30)


def test_eviction_keeps_a_chain_reachable() -> None:
    """C20: a pool of 3 caches a chain; one block is needed: the last goes, the rest still hit."""
    for i in range(100):
        bed = CoreBed(num_blocks=3)
        bed.add(prompt(12, i), 1)
        bed.run()
        bed.add([99_999], 1)
        bed.run()
        assert bed.events(Reason.EVICTED)[0].detail == (1,)
        again = bed.add(prompt(12, i), 1)
        bed.run()
        assert bed.requests[again].num_cached_tokens == 8


def test_half_filled_blocks_go_before_cached_ones() -> None:
    """C20: a partial tail is never cached, so it is simply free."""
    bed = CoreBed(num_blocks=4)
    bed.add(prompt(13), 1)
    bed.run()
    assert bed.scheduler.stats().num_free_blocks == 1
    bed.add([99_999], 1)
    bed.run()
    assert bed.events(Reason.EVICTED) == []


def test_unused_cached_blocks_are_given_up_first() -> None:
    """C23: the pool is full of them; a prompt that needs all runs in the same step."""
    bed = CoreBed(num_blocks=8)
    bed.add(prompt(32), 1)
    bed.run()
    assert bed.scheduler.stats().num_free_blocks == 0
    assert bed.scheduler.stats().num_cached_blocks == 8
    b = bed.add(prompt(32, 1), 1)
    bed.step()
    assert bed.ran()[-1] == {b}
    assert bed.scheduler.stats().num_preemptions == 0
    assert sum(int(event.detail[0]) for event in bed.events(Reason.EVICTED)) == 8


def test_admission_does_not_count_the_hit_twice() -> None:
    """Blocks that a request hits are no room for its other tokens."""
    bed = CoreBed(num_blocks=6)
    bed.add(prompt(12), 1)
    bed.run()
    bed.add(prompt(9, 1), 4)
    bed.step()
    c = bed.add(prompt(16), 2)
    bed.step()
    assert bed.reasons(c) == [Reason.NO_BLOCKS], "3 of its 4 blocks are cached, none is left"
    bed.run()
    assert bed.outputs[c] == alone(prompt(16), 2)


def test_without_prefix_caching_nothing_is_kept() -> None:
    """The setting turns all of it off."""
    bed = CoreBed(enable_prefix_caching=False)
    for _ in range(2):
        bed.add(prompt(20), 3)
        bed.run()
    assert bed.scheduler.stats().prefix_hits_tokens == 0
    assert bed.scheduler.stats().num_free_blocks == 64


def test_waiting_in_the_queue_does_not_match_again_and_again() -> None:
    """C113: the head of the queue is matched once, until the tree changes; a decode step walks
    nowhere in it."""
    bed = CoreBed(num_blocks=8)
    bed.add(prompt(4), 25)
    bed.step()
    bed.add(prompt(28, 1), 2)
    cache, calls = bed.scheduler.kv.cache, []
    match_at, walk = cache.match_at, cache._walk
    cache.match_at = lambda *args: calls.append("match") or match_at(*args)  # type: ignore[method-assign,func-returns-value]
    cache._walk = lambda *args: calls.append("walk") or walk(*args)  # type: ignore[method-assign,func-returns-value]
    for _ in range(20):
        bed.step()
    assert calls == ["walk", "match"]
