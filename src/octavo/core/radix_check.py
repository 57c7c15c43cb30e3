"""Recount a prefix cache from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .radix_cache import RadixCache


def check(cache: RadixCache) -> None:
    """Recount: edges are whole blocks under the right key, counters and pins add up."""
    queued = {
        id(entry[2])
        for in_tier, heap in enumerate(cache._leaves)
        for entry in heap
        if cache._is_current(entry, bool(in_tier))
    }
    nodes = list(cache.nodes())
    for node in nodes:
        parent = node.parent
        assert parent is not None, "a node that left is still in the tree"
        assert node.block_ids, "an empty node is in the tree"
        num_tokens = len(node.block_ids) * cache.block_size
        assert len(node.token_ids) == num_tokens, "an edge holds other than whole blocks"
        assert parent.children.get(cache._key(node.token_ids)) is node, "a node has the wrong key"
        assert node.pins >= sum(child.pins for child in node.children.values()), (
            "a pinned node has an unpinned ancestor"
        )
        resident = [child for child in node.children.values() if not child.in_tier]
        assert node.num_resident == len(resident), "the number of resident children is wrong"
        assert not (node.in_tier and resident), "a block is behind one that is in the tier"
        if node.pins == 0 and not (node.children if node.in_tier else resident):
            assert id(node) in queued, "an unpinned leaf can't be found for eviction"
    assert all(root.children for root in cache._roots.values()), "an empty root was kept"
    scopes = {root.node_id: scope for scope, root in cache._roots.items()}
    assert cache._scopes == scopes, "scopes are not those of the roots"
    block_ids = cache.block_ids()
    assert len(set(block_ids)) == len(block_ids), "a block is in the tree twice"
    assert cache._num_nodes == len(nodes), "the number of nodes is wrong"
    assert cache.num_blocks == len(block_ids), "the number of cached blocks is wrong"
    slots = cache.slots()
    assert len(set(slots)) == len(slots), "a slot is in the tree twice"
    evictable = [0, 0]
    for node in nodes:
        evictable[node.in_tier] += len(node.block_ids) if node.pins == 0 else 0
    assert cache.num_evictable == evictable[0], "the number of evictable blocks is wrong"
    assert cache.num_evictable_slots == evictable[1], "the number of evictable slots is wrong"
