"""The prefix cache as a list of runs, to be written to a file and read back by another process."""

from __future__ import annotations

from collections.abc import Sequence

from ..messages import KeptRun
from .radix_cache import Node, RadixCache


def export(cache: RadixCache, max_blocks: int) -> list[KeptRun]:
    """Runs of at most `max_blocks` blocks in all: the most recently used ones, parents first."""
    nodes = sorted(cache.nodes(), key=lambda node: -node.last_used)  # no child is younger
    index_of: dict[Node, int] = {}
    runs: list[KeptRun] = []
    for node in nodes:
        parent, places = node.parent, tuple(node.block_ids)
        assert parent is not None
        follows = index_of.get(parent, -1)
        if len(places) > max_blocks or (parent.parent and follows < 0):
            continue
        max_blocks -= len(places)
        index_of[node] = len(runs)
        scope = cache._scopes[parent.node_id] if follows < 0 else runs[follows].scope
        runs.append(KeptRun(scope, follows, node.token_ids, places, node.in_tier))
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
