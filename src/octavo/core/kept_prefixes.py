"""The prefix cache as a list of runs, to be written to a file and read back by another process."""

from __future__ import annotations

from collections.abc import Sequence

from ..messages import KeptRun
from .radix_cache import Node, RadixCache, path_to


def export(cache: RadixCache, max_blocks: int) -> list[KeptRun]:
    """Runs of at most `max_blocks` blocks in all: the most recently used ones, parents first."""
    nodes = sorted(cache.nodes(), key=lambda node: -node.last_used)  # no child is younger
    index_of: dict[Node, int] = {}
    runs: list[KeptRun] = []
    for node in nodes:
        parent = node.parent
        assert parent is not None
        if len(node.block_ids) > max_blocks or (parent.parent and parent not in index_of):
            continue
        max_blocks -= len(node.block_ids)
        index_of[node] = len(runs)
        scope, follows, places = _scope_of(cache, node), index_of.get(parent, -1), node.block_ids
        runs.append(KeptRun(scope, follows, node.token_ids, tuple(places), node.in_tier))
    return runs


def graft(cache: RadixCache, runs: Sequence[KeptRun]) -> None:
    """Fill an empty tree with runs whose blocks are in slots of the tier."""
    nodes: list[Node] = []
    for age, run in enumerate(runs):
        parent = cache.root(run.scope) if run.parent < 0 else nodes[run.parent]
        node = cache._make_node(parent, run.token_ids, list(run.places))
        node.in_tier, node.last_used = True, len(runs) - age
        parent.num_resident -= 1
        cache.num_evictable_slots += len(run.places)
        nodes.append(node)
    cache._clock = len(runs)
    cache._tick()
    for node in nodes:
        cache._note_leaf(node)


def _scope_of(cache: RadixCache, node: Node) -> str:
    *_, top = path_to(node)
    assert top.parent is not None
    return cache._scopes[top.parent.node_id]
