"""BlockPool: references, order of ids, recount."""

from __future__ import annotations

import random

import pytest

from beds.assertions import unseen
from octavo.core.block_pool import BlockPool


def test_allocate_takes_all_or_nothing() -> None:
    """None means not now, and leaves the pool as it was (R9)."""
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    pool.check()


def test_lowest_ids_leave_first_whatever_came_back_last() -> None:
    """Memory that was never needed is never touched."""
    pool = BlockPool(8)
    first = pool.allocate(5)
    assert first == [0, 1, 2, 3, 4]
    pool.release([3, 1, 4])
    assert pool.allocate(4) == [1, 3, 4, 5]
    pool.check()


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    """Several tables may point at one block (R34)."""
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.share([0])
    pool.release([0])
    assert pool.num_free == 1
    pool.release([0])
    assert pool.num_free == 2
    pool.check()


def test_a_double_free_is_an_error_at_once() -> None:
    """C16: it must not wait until two requests own the block."""
    pool = BlockPool(2)
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([0])
    with pytest.raises(AssertionError, match="is free"):
        pool.share([1])


def test_counts_add_up_under_random_use() -> None:
    """Recount after each of many random operations."""
    rng = random.Random(1)
    pool = BlockPool(12)
    held: list[int] = []
    for _ in range(2000):
        if rng.random() < 0.4:
            held += pool.allocate(rng.randrange(4)) or []
        elif held and rng.random() < 0.3:
            block_id = rng.choice(held)
            pool.share([block_id])
            held.append(block_id)
        elif held:
            pool.release([held.pop(rng.randrange(len(held)))])
        pool.check()
        assert pool.num_free == 12 - len(set(held))


def test_check_sees_corruption() -> None:
    """Each way to break the pool is noticed."""

    def broken(**changes: object) -> BlockPool:
        pool = BlockPool(4)
        pool.allocate(2)
        for name, value in changes.items():
            setattr(pool, name, value)
        return pool

    broken().check()
    said: list[str] = []
    for changes, message in (
        ({"_free": [2, 2, 3]}, "freed twice"),
        ({"_free": [1, 2, 3]}, "still referenced"),
        ({"_free": [3]}, "leaked"),
        ({"_free": [3, 2]}, "out of order"),
        ({"ref_counts": [1, 1, 0, -1]}, "below zero"),
        ({"ref_counts": [1, 1, 0]}, "size"),
    ):
        with pytest.raises(AssertionError, match=message):
            broken(**changes).check()
        said.append(message)
    assert unseen(said, BlockPool.check) == []
