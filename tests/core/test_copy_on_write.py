"""Copy-on-write: blocks are shared until somebody writes in them; hits are counted in tokens."""

from __future__ import annotations

import pytest

from beds.core_bed import CoreBed, alone
from octavo.core.event_log import Reason
from octavo.messages import Transfer


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def add_group(bed: CoreBed, tokens: list[int], max_tokens: int, n: int) -> list[int]:
    leader = bed.add(tokens, max_tokens)
    return [leader, *(bed.add(tokens, max_tokens, leader=leader) for _ in range(n - 1))]


@pytest.mark.parametrize("scope", ["", "x"])
def test_answers_to_another_prompt_share_nothing(scope: str) -> None:
    """A mistake of ours, and a loud one: another prompt, or another scope, has another leader."""
    bed = CoreBed()
    leader = bed.add(prompt(9), 6)
    bed.add(prompt(9) if scope else [*prompt(7), 1, 8], 6, leader=leader, scope=scope)
    bed.step()
    with pytest.raises(AssertionError, match="its leader"):
        bed.step()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", range(1, 14))
def test_n_answers_share_one_prefill(length: int, prefix_caching: bool) -> None:
    """R34: the prompt is computed once; each other answer computes its last token again, and
    copies a block only if it has to write in one that the first has begun."""
    bed = CoreBed(enable_prefix_caching=prefix_caching)
    group = add_group(bed, prompt(length), 6, 4)
    plans = [bed.step(), bed.step()]
    assert bed.model.traces[0].num_new_tokens == {0: length}
    assert bed.model.traces[1].num_new_tokens == dict.fromkeys(group, 1)
    assert plans[0].transfers == ()
    assert len(plans[1].transfers) == (3 if (length - 1) % 4 else 0)
    full = (length - 1) // 4
    tables = [bed.requests[i].block_ids for i in group]
    assert all(table[:full] == tables[0][:full] for table in tables)
    assert len({block for table in tables for block in table[full:]}) == sum(
        len(table) - full for table in tables
    ), "a block that is written belongs to one answer"
    bed.run()
    assert [bed.outputs[i] for i in group] == [alone(prompt(length), 6)] * 4
    assert bed.num_computed() == length + 3 + 4 * 5


def test_answers_wait_for_a_prompt_that_is_computed_in_chunks() -> None:
    """R34: held with a reason until the first has computed the last chunk."""
    bed = CoreBed(max_num_batched_tokens=8)
    group = add_group(bed, prompt(22), 3, 3)
    for _ in range(3):
        bed.step()
    assert bed.ran() == [{0}, {0}, {0}]
    assert bed.reasons(1)[0] in (Reason.TOKEN_BUDGET, Reason.PROMPT_PENDING)
    bed.run()
    assert bed.ran()[3] == set(group)
    assert [bed.outputs[i] for i in group] == [alone(prompt(22), 3)] * 3
    assert [e.detail for e in bed.events(Reason.FORKED)] == [(21,), (21,)]


def test_cached_tokens_of_n_answers_count_once() -> None:
    """C65: n = 2: what was cached before, for both; what one computed for the other is no hit."""
    bed = CoreBed()
    for _ in range(2):
        add_group(bed, prompt(40), 3, 2)
        bed.run()
    assert [bed.requests[i].num_cached_tokens for i in range(4)] == [0, 0, 39, 39]
    stats = bed.scheduler.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (80, 39)


@pytest.mark.parametrize("ends", ["abort before", "abort after", "preempt"])
def test_the_others_answer_whatever_becomes_of_the_first(ends: str) -> None:
    """R34: a leader that leaves, at any time, takes nobody with it."""
    for prefix_caching in (True, False):
        for num_steps in range(5):
            bed = CoreBed(max_num_batched_tokens=7, enable_prefix_caching=prefix_caching)
            add_group(bed, prompt(18), 5, 3)
            for _ in range(num_steps):
                bed.step()
            if ends == "preempt":
                bed.scheduler.preempt(0)
            elif ends == "abort before":
                bed.scheduler.finish(0, "abort")
            else:
                bed.step(lambda bed=bed: bed.scheduler.finish(0, "abort"))  # type: ignore[misc]
            bed.run()
            assert [bed.outputs[i] for i in (1, 2)] == [alone(prompt(18), 5)] * 2


def test_one_token_of_n_answers() -> None:
    """The first is done before the others start: they find its full blocks in the cache."""
    bed = CoreBed()
    group = add_group(bed, prompt(10), 1, 3)
    bed.run()
    assert [bed.outputs[i] for i in group] == [alone(prompt(10), 1)] * 3
    assert bed.num_computed() == 10 + 2 + 2, "the two full blocks are found in the cache"


def test_a_prompt_that_parts_inside_a_block_reuses_its_shared_tokens() -> None:
    """R34: 10 of 16 tokens are shared: 2 blocks by reference, 2 tokens by copy."""
    bed = CoreBed()
    bed.add(prompt(16), 8)
    bed.step()
    parted = prompt(10) + prompt(6, 1)
    second = bed.add(parted, 4)
    plan = bed.step()
    assert bed.requests[second].num_cached_tokens == 10
    assert bed.requests[second].block_ids[:2] == bed.requests[0].block_ids[:2]
    source, target = bed.requests[0].block_ids[2], bed.requests[second].block_ids[2]
    assert plan.transfers == (Transfer("copy", source, target),)
    bed.run()
    assert bed.outputs[0] == alone(prompt(16), 8)
    assert bed.outputs[second] == alone(parted, 4)


def test_the_source_of_a_copy_may_be_given_away_in_the_same_step() -> None:
    """C22: a pool so small that the copied block itself is evicted to make room."""
    bed = CoreBed(num_blocks=3)
    bed.add(prompt(8), 5)
    bed.run()
    assert bed.scheduler.stats().num_cached_blocks == 3
    parted = prompt(6) + prompt(5, 1)
    second = bed.add(parted, 2)
    bed.run()
    assert bed.requests[second].num_cached_tokens == 6
    assert bed.outputs[second] == alone(parted, 2)


def test_no_copy_from_another_scope() -> None:
    """C94: nor a begun block: not one token is shared across scopes."""
    bed = CoreBed()
    bed.add(prompt(10), 3, scope="x")
    bed.run()
    other = bed.add(prompt(10), 3, scope="y")
    bed.run()
    assert bed.requests[other].num_cached_tokens == 0
    assert all(not event.detail[1] for event in bed.events(Reason.ADMITTED))
