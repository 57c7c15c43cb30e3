"""RadixCache: whole blocks, real tokens, pins, eviction order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from beds.assertions import unseen
from octavo.core import radix_check
from octavo.core.radix_cache import Node, Place, RadixCache


def tokens(text: str) -> list[int]:
    """A token per letter."""
    return [ord(letter) for letter in text]


def cache_with(*texts: str, block_size: int = 2) -> RadixCache:
    """A cache that holds the full blocks of each text, ids counted up."""
    cache = RadixCache(block_size)
    for text in texts:
        known = hit(cache, text)
        new = range(cache.num_blocks, cache.num_blocks + len(text) // block_size - len(known))
        _, adopted = cache.insert(tokens(text), [*known, *new], pin=False)
        assert adopted == list(new)
        cache.check()
    return cache


def hit(cache: RadixCache, text: str, scope: str = "") -> tuple[int, ...]:
    match = cache.match(tokens(text), len(text) // 2 * 2, scope)
    return () if match is None else match.block_ids


def test_longest_prefix_in_whole_blocks() -> None:
    """A prompt that parts inside a block hits only the blocks before it (R114)."""
    cache = cache_with("aabbcc", "aabbdd", "ee")
    assert hit(cache, "aabbccxx") == (0, 1, 2)
    assert hit(cache, "aabbdd") == (0, 1, 3)
    assert hit(cache, "aabbd") == (0, 1)
    assert hit(cache, "aabx") == (0,)
    assert hit(cache, "eeaa") == (4,)
    assert hit(cache, "xx") == ()
    assert hit(cache, "") == ()


def test_a_prompt_that_parts_inside_a_block_finds_its_first_tokens() -> None:
    """R34: the block that shares most of them, wherever it stands; never past the limit."""
    cache = RadixCache(4)
    cache.insert(tokens("aaaabbbb"), [0, 1], pin=False)
    cache.insert(tokens("aaaabbcc"), [0, 2], pin=False)

    def tail(text: str, max_tokens: int = 99) -> tuple[int, ...] | None:
        match = cache.match(tokens(text), max_tokens)
        if match is None:
            return None
        at = () if match.tail is None else match.tail
        assert match.num_tokens == 4 * len(match.block_ids) + (at[1] if at else 0)
        return (len(match.block_ids), *at)

    assert tail("aaaabbb") == (1, 1, 3)
    assert tail("aaaabbcx") == (1, 2, 3)
    assert tail("aaaabbbb", 7) == (1, 1, 3)
    assert tail("aaaabbbb", 4) == (1,)
    assert tail("aaaax") == (1,)
    assert tail("aax") == (0, 0, 2)
    assert tail("aaaabbbb", 3) == (0, 0, 3)
    assert tail("x") is None
    assert cache.match(tokens("aax"), 3, "other scope") is None


def test_the_limit_of_a_match_is_kept() -> None:
    """Callers leave a token to compute by asking for fewer blocks (C4)."""
    cache = cache_with("aabbcc")
    match = cache.match(tokens("aabbcc"), 4)
    assert match is not None
    assert match.block_ids == (0, 1)
    assert cache.match(tokens("aabbcc"), 0) is None


def test_scopes_never_meet() -> None:
    """C94: the scope is part of the key, apart from the tokens."""
    cache = RadixCache(2)
    cache.insert(tokens("aabb"), [0, 1], "tenant", pin=False)
    cache.insert(tokens("aabb"), [2, 3], "", pin=False)
    assert hit(cache, "aabb", "tenant") == (0, 1)
    assert hit(cache, "aabb") == (2, 3)
    assert hit(cache, "aabb", "other") == ()
    cache.check()
    cache.evict(4)
    cache.check()
    assert cache.num_blocks == 0


def test_every_hit_holds_the_very_tokens_asked_for() -> None:
    """C95: with blocks of a tiny alphabet, thousands of random prompts hit only their own tokens.

    A dict below tells which tokens each block holds; there is no hash to collide.
    """
    rng = random.Random(7)
    cache = RadixCache(2)
    written: dict[int, tuple[int, ...]] = {}
    next_id = 0
    for _ in range(2000):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(2, 12))]
        num_blocks = len(prompt) // 2
        match = cache.match(prompt, 2 * num_blocks)
        for i, block_id in enumerate(match.block_ids if match else ()):
            assert written[block_id] == tuple(prompt[: 2 * i + 2])
        block_ids = list(range(next_id, next_id + num_blocks))
        _, adopted = cache.insert(prompt, block_ids, pin=False)
        for i, block_id in enumerate(block_ids):
            if block_id in adopted:
                written[block_id] = tuple(prompt[: 2 * i + 2])
        next_id += num_blocks
        if rng.random() < 0.3:
            cache.evict(rng.randrange(1, 6))
    cache.check()


def test_a_twin_is_not_adopted() -> None:
    """C19: the tree keeps the block it has; the rest of the twin's path hangs below it."""
    cache = cache_with("aabb")
    _, adopted = cache.insert(tokens("aabbcc"), [7, 8, 9], pin=False)
    assert adopted == [9]
    assert hit(cache, "aabbcc") == (0, 1, 9)
    cache.check()


def test_eviction_takes_a_chain_from_its_end() -> None:
    """C20: what stays in the cache can still be reached."""
    cache = cache_with("aabbcc")
    assert cache.evict(1) == [2]
    assert hit(cache, "aabbcc") == (0, 1)
    cache.check()
    assert cache.evict(5) == [0, 1]
    cache.check()
    assert cache.evict(1) == []


def test_least_recently_used_leaf_goes_first() -> None:
    """R116, and a hit makes a leaf recent again."""
    cache = cache_with("aabb", "aacc", "dd")
    match = cache.match(tokens("aabb"), 4)
    assert match is not None
    cache.unpin(cache.pin(match))
    assert cache.evict(1) == [2], "aacc is the oldest leaf"
    assert cache.evict(1) == [3], "then dd"
    assert cache.evict(1) == [1], "then what was hit"
    assert cache.evict(1) == [0], "and its parent last"
    cache.check()


def test_looking_is_not_using() -> None:
    """A request that waits does not keep its prefix young; only a pin does."""
    cache = cache_with("aa", "bb")
    for _ in range(5):
        assert hit(cache, "aa") == (0,)
    assert cache.evict(1) == [0]


def test_nothing_in_use_is_evicted() -> None:
    """R116: a pinned path stays, its unpinned side branches go."""
    cache = cache_with("aabbcc", "aabbdd")
    match = cache.match(tokens("aabbcc"), 6)
    assert match is not None
    node = cache.pin(match)
    cache.check()
    assert cache.num_evictable == 1
    assert cache.evict(10) == [3]
    assert hit(cache, "aabbcc") == (0, 1, 2)
    cache.unpin(node)
    cache.check()
    assert cache.evict(10) == [2, 0, 1]


def test_a_pin_survives_splits_above_it() -> None:
    """A node that is split under a request still lets go of its whole path."""
    cache = RadixCache(1)
    node, _ = cache.insert(tokens("abcd"), [0, 1, 2, 3], pin=True)
    cache.insert(tokens("abx"), [0, 1, 4], pin=False)
    cache.insert(tokens("ay"), [0, 5], pin=False)
    assert cache.num_evictable == 2
    assert sorted(cache.evict(9)) == [4, 5]
    cache.check()
    cache.unpin(node)
    assert cache.num_evictable == 4
    cache.check()
    assert sorted(cache.evict(9)) == [0, 1, 2, 3]


def test_a_match_in_the_middle_of_an_edge_pins_only_that_far() -> None:
    """The rest of the edge can be evicted."""
    cache = cache_with("aabbccdd")
    match = cache.match(tokens("aabbxx"), 6)
    assert match is not None
    assert match.num_evictable == 2
    cache.pin(match)
    assert cache.num_evictable == 2
    assert cache.evict(9) == [2, 3]
    cache.check()


def test_a_match_counts_what_pinning_it_would_cost() -> None:
    """Blocks that somebody pins already are not taken from the evictable ones again."""
    cache = cache_with("aabbcc")
    match = cache.match(tokens("aa"), 2)
    assert match is not None
    cache.pin(match)
    match = cache.match(tokens("aabbcc"), 6)
    assert match is not None
    assert match.num_evictable == 2
    before = cache.num_evictable
    cache.pin(match)
    assert before - cache.num_evictable == 2


def test_what_is_left_of_a_path_that_moved_to_the_tier_is_as_old_as_it_was() -> None:
    """R116: its next block goes before one that was used later."""
    cache = cache_with("aabbcc", "dd")
    assert cache.evict(1, lambda block_ids: [0] * len(block_ids)) == [2]
    cache.check()
    assert cache.evict(2) == [0, 1]
    cache.check()
    assert hit(cache, "dd") == (3,)


@pytest.mark.parametrize("in_tier", [False, True])
def test_an_emptied_node_that_is_kept_fails_and_does_not_hang(in_tier: bool) -> None:
    """It is the oldest leaf, gives nothing, and would be the oldest leaf again."""
    cache = cache_with("aabbcc")
    if in_tier:
        cache.evict(3, lambda block_ids: [7 + i for i in range(len(block_ids))])

    def keep(node: Node) -> None:
        node.block_ids, node.token_ids = [], ()
        cache._note_leaf(node)

    cache._remove = keep  # type: ignore[method-assign]
    evict = cache.evict_slots if in_tier else cache.evict
    with pytest.raises(AssertionError, match="a node without blocks was kept"):
        evict(4)  # one more than there are


def test_the_eviction_queue_stays_small() -> None:
    """Hits push stale entries only up to a bound, and eviction still finds every leaf."""
    cache = cache_with("aa", "bb", "cc")
    for i in range(2000):
        match = cache.match(tokens("abc"[i % 3] * 2), 2)
        assert match is not None
        cache.unpin(cache.pin(match))
    assert len(cache._leaves[0]) <= 64 + 2 * 3
    cache.check()
    assert len(cache.evict(3)) == 3


def test_random_use_against_a_model() -> None:
    """Insert, hit, pin, unpin and evict at random; recount after each."""
    rng = random.Random(3)
    cache = RadixCache(2)
    pinned: list[Node] = []
    in_tree: set[int] = set()
    next_id = 0
    for _ in range(3000):
        prompt = [rng.randrange(2) for _ in range(2 * rng.randrange(1, 7))]
        choice = rng.random()
        if choice < 0.3:
            block_ids = list(range(next_id, next_id + len(prompt) // 2))
            next_id += len(block_ids)
            pin = rng.random() < 0.5
            node, adopted = cache.insert(prompt, block_ids, rng.choice("xy"), pin=pin)
            in_tree |= set(adopted)
            pinned += [node] if pin else []
        elif choice < 0.5:
            match = cache.match(prompt, len(prompt) // 2 * 2, rng.choice("xy"))
            if match is not None and match.block_ids:
                pinned.append(cache.pin(match))
        elif choice < 0.8 and pinned:
            cache.unpin(pinned.pop(rng.randrange(len(pinned))))
        else:
            wanted, evictable = rng.randrange(6), cache.num_evictable
            evicted = cache.evict(wanted)
            assert len(evicted) == min(wanted, evictable), "an evictable block was not found"
            in_tree -= set(evicted)
        cache.check()
        assert set(cache.block_ids()) == in_tree


def test_a_place_found_before_is_the_place_found_now() -> None:
    """C109: asked again after inserts, hits, splits, evictions and moves to and from the tier, a
    prompt leaves the tree where a new search says; some answers of before do hold."""
    rng = random.Random(5)
    cache = RadixCache(2)
    prompts = [[rng.randrange(2) for _ in range(n)] for n in range(14) for _ in range(3)]
    before: dict[int, Place] = {}
    slots = iter(range(10**9))
    num_held = 0
    for step in range(1500):
        prompt, choice = rng.choice(prompts), rng.random()
        if choice < 0.4 and len(prompt) > 1:
            ids = range(1000 * step, 1000 * step + len(prompt) // 2)
            cache.insert(prompt, ids, rng.choice("xy"), pin=False)
        elif choice < 0.6:
            match = cache.match(prompt, len(prompt), "x")
            if match is not None and match.node is not None:
                cache.unpin(cache.pin(match))
        elif choice < 0.8:
            cache.evict(rng.randrange(4))
        elif choice < 0.9:
            cache.evict(rng.randrange(4), lambda ids: [next(slots) for _ in ids])
        else:
            cache.evict_slots(rng.randrange(4))
        for i, other in enumerate(prompts):
            now = cache.find(other, len(other), "x")
            again = cache.find(other, len(other), "x", before.get(i))
            assert again == now
            num_held += again is before.get(i)
            before[i] = again
    assert num_held > 1000


def leaf(cache: RadixCache) -> Node:
    return next(node for node in cache.nodes() if not node.children)


def first(cache: RadixCache) -> Node:
    return next(iter(cache.nodes()))


def without_parent(cache: RadixCache) -> None:
    leaf(cache).parent = None


def empty(cache: RadixCache) -> None:
    leaf(cache).block_ids.clear()


def resident_behind_the_tier(cache: RadixCache) -> None:
    cache.num_evictable_slots = len(first(cache).block_ids)
    first(cache).in_tier = True


def twice_in_the_tier(cache: RadixCache) -> None:
    cache.evict(2, lambda block_ids: [7] * len(block_ids))


CORRUPTIONS: list[tuple[Callable[[RadixCache], object], str]] = [
    (without_parent, "a node that left is still in the tree"),
    (empty, "an empty node is in the tree"),
    (lambda cache: setattr(leaf(cache), "token_ids", (1,)), "an edge holds other than whole"),
    (lambda cache: leaf(cache).block_ids.append(99), "an edge holds other than whole blocks"),
    (lambda cache: setattr(leaf(cache), "token_ids", (0, 0)), "a node has the wrong key"),
    (lambda cache: setattr(leaf(cache), "pins", 1), "a pinned node has an unpinned ancestor"),
    (lambda cache: setattr(first(cache), "num_resident", 1), "the number of resident children"),
    (resident_behind_the_tier, "a block is behind one that is in the tier"),
    (lambda cache: cache._leaves[0].clear(), "an unpinned leaf can't be found"),
    (lambda cache: cache.root("x"), "an empty root was kept"),
    (lambda cache: cache._scopes.update({99: "y"}), "scopes are not those of the roots"),
    (lambda cache: leaf(cache).block_ids.__setitem__(0, 0), "a block is in the tree twice"),
    (lambda cache: setattr(cache, "_num_nodes", 9), "the number of nodes is wrong"),
    (lambda cache: setattr(cache, "num_blocks", 9), "the number of cached blocks is wrong"),
    (twice_in_the_tier, "a slot is in the tree twice"),
    (lambda cache: setattr(cache, "num_evictable", 9), "the number of evictable blocks is wrong"),
    (lambda cache: setattr(cache, "num_evictable_slots", 9), "the number of evictable slots"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS)
def test_check_sees_corruption(corrupt: Callable[[RadixCache], object], message: str) -> None:
    """Each way to break the tree is noticed, and called by its name."""
    cache = cache_with("aabbcc", "aabbdd")
    cache.check()
    corrupt(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check()


def test_every_assertion_of_the_check_is_seen_to_fail() -> None:
    """None that can't, and none that nobody has tried."""
    assert unseen([message for _, message in CORRUPTIONS], radix_check.check) == []
