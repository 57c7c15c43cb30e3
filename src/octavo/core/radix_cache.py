"""The prefix cache: a tree over token runs whose edges are whole blocks.

From a scope's root, each path spells tokens whose K/V are in the blocks along it. Edges hold the
real tokens and every hit compares them: there is no hash that two prompts could share. A node is
pinned while a live request uses it, and then so are its ancestors; what is unpinned can be
evicted, least recently used leaf first, from its tail, so that what stays is reachable (C20).

A node whose blocks were evicted may stay, with its K/V in slots of a tier below the pool. What is
under such a node is in the tier as well: along a path come blocks, then slots.

The tree stores block ids and slots, and counts pins. References belong to BlockPool: callers add
one for each block that `insert` adopts and drop it for each block or slot that leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from typing import NamedTuple

from .radix_check import check

BlockTokens = tuple[int, ...]

MAX_TAIL_CANDIDATES = 64
"""Children that are looked at for a prompt that parts from all of them inside a block."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge into the tree: `token_ids` of whole blocks, whose K/V are in `block_ids`."""

    node_id: int
    parent: Node | None
    """None for a root, and for a node that left the tree."""
    token_ids: tuple[int, ...]
    block_ids: list[int]
    """Slots, if the node is in the tier."""
    in_tier: bool = False
    num_resident: int = 0
    """Children that are not in the tier."""
    children: dict[BlockTokens, Node] = field(default_factory=dict)
    """By the tokens of their first block."""
    pins: int = 0
    """Live requests whose path ends here or below."""
    last_used: int = 0


class Tail(NamedTuple):
    """The first tokens of one more block: whoever shares them copies it, and writes on (R34)."""

    block_id: int
    num_tokens: int


class Match(NamedTuple):
    """The longest cached prefix of a prompt: `block_ids`, in order of position, and `tail`."""

    node: Node | None
    """Where the whole blocks end: after the first `num_node_blocks` of this node's blocks. None
    where nothing is to be pinned."""
    num_node_blocks: int
    block_ids: tuple[int, ...]
    num_evictable: int
    """How many of these blocks nobody uses now: pinning takes them from the evictable ones."""
    num_tokens: int
    """All that is found, in tokens."""
    tail: Tail | None = None
    slots: tuple[int, ...] = ()
    """Of the tier, for the blocks after `block_ids`."""


class Place(NamedTuple):
    """Where a prompt leaves the tree: in `node`, after so many of the blocks that it had then."""

    node: Node
    num_node_blocks: int
    num_then: int
    num_blocks: int
    """Along the whole path."""


def path_to(node: Node) -> Iterator[Node]:
    """From `node` up; the root, which has no blocks, is left out."""
    while node.parent is not None:
        yield node
        node = node.parent


NOWHERE = Node(-1, None, (), [])
"""The root of a scope in which nothing is stored."""

Entry = tuple[int, int, Node]


class RadixCache:
    """Find, insert, pin, evict. Costs grow with the length of a path, never with the tree."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self.num_evictable = 0
        """Blocks in unpinned nodes."""
        self.num_evictable_slots = 0
        """Slots in unpinned nodes."""
        self.dropped_slots: list[int] = []
        """Slots that left the tree; whoever owns them takes them from here."""
        self.version = 0
        """Moves with every change: a Match is good as long as it stands still."""
        self._roots: dict[str, Node] = {}
        self._scopes: dict[int, str] = {}  # of each root, by node id
        self._clock = 0
        self._num_nodes = 0
        self._next_node_id = 0
        # Entries (last_used, node_id, node); one is stale once its node was used again, got a
        # child or a pin, or left. Looked at only when it comes to the top: no upkeep on a hit.
        # The first heap is of those in the pool, the second of those in the tier.
        self._leaves: tuple[list[Entry], list[Entry]] = ([], [])

    def find(
        self, token_ids: Sequence[int], max_tokens: int, scope: str, before: Place | None = None
    ) -> Place:
        """Where a prompt of which at most `max_tokens` tokens count leaves the tree.

        Whether `before`, the answer of before, still holds is seen at once: nodes leave from
        their ends, and they are split where prompts part.
        """
        root = self._roots.get(scope, NOWHERE)
        max_blocks = max_tokens // self.block_size
        if before is not None:
            node, num_node_blocks, num_then, num_blocks = before
            key = self._key(token_ids, num_blocks)
            in_tree = node.parent is not None or node is root
            is_end = num_node_blocks < num_then or num_blocks == max_blocks
            if in_tree and len(node.block_ids) == num_then and (is_end or key not in node.children):
                return before
        path = [(root, 0), *self._walk(root, token_ids, max_blocks)]
        node, num_node_blocks = path[-1]
        num_blocks = sum(count for _, count in path)
        return Place(node, num_node_blocks, len(node.block_ids), num_blocks)

    def match(self, token_ids: Sequence[int], max_tokens: int, scope: str = "") -> Match | None:
        """The longest cached prefix of at most `max_tokens` tokens; None if there is none."""
        return self.match_at(self.find(token_ids, max_tokens, scope), token_ids, max_tokens)

    def match_at(self, place: Place, token_ids: Sequence[int], max_tokens: int) -> Match | None:
        """What is cached of a prompt, where `find` says that it leaves the tree."""
        node, num_node_blocks = place.node, place.num_node_blocks
        num_evictable, block_ids, slots = 0, list[int](), list[int]()
        for at in reversed(list(path_to(node))):
            run = at.block_ids[:num_node_blocks] if at is node else at.block_ids
            if at.in_tier:
                slots += run
                continue
            block_ids += run
            num_evictable += len(run) if at.pins == 0 else 0
        num_blocks = len(block_ids) + len(slots)
        num_tokens = num_blocks * self.block_size
        tail = self._tail(node, num_node_blocks, token_ids[num_tokens:max_tokens])
        if not num_blocks and tail is None:
            return None
        num_tokens += 0 if tail is None else tail.num_tokens
        end, ids = node if num_blocks else None, tuple(block_ids)
        return Match(end, num_node_blocks, ids, num_evictable, num_tokens, tail, tuple(slots))

    def _tail(self, node: Node, num_node_blocks: int, token_ids: Sequence[int]) -> Tail | None:
        """Which block after this place begins with most of `token_ids`; None if there is none."""
        if node.in_tier or not token_ids:
            return None
        if num_node_blocks < len(node.block_ids):
            start = num_node_blocks * self.block_size
            following = [(node.token_ids[start:], node.block_ids[num_node_blocks])]
        else:
            children = islice(reversed(node.children.values()), MAX_TAIL_CANDIDATES)
            following = [
                (child.token_ids, child.block_ids[0])
                for child in children
                if child.token_ids[0] == token_ids[0] and not child.in_tier
            ]
        best: Tail | None = None
        for known_ids, block_id in following:
            num_equal = 0
            for known, wanted in zip(known_ids, token_ids, strict=False):
                if known != wanted:
                    break
                num_equal += 1
            if num_equal > (0 if best is None else best.num_tokens):
                best = Tail(block_id, num_equal)
        return best

    def pin(self, match: Match) -> Node:
        """Hold the matched path until `unpin` of the returned node."""
        assert match.node is not None, "there is nothing to pin"
        node = self._split(match.node, match.num_node_blocks)
        self._pin(node)
        return node

    def unpin(self, node: Node) -> None:
        """Let go of a pinned path; it becomes the most recently used one."""
        self._tick()
        for at in path_to(node):
            assert at.pins > 0, "a node was unpinned twice"
            at.pins -= 1
            at.last_used = self._clock
            if at.pins == 0:
                self._count_evictable(at, len(at.block_ids))
                self._note_leaf(at)

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], scope: str = "", *, pin: bool
    ) -> tuple[Node, list[int]]:
        """Store a computed prefix, `block_ids[i]` holding the i-th block of `token_ids`.

        Where the tree has these tokens already it keeps its own block: the caller's is a twin
        and stays the caller's (C19). Where it has them in the tier, the caller's block takes the
        place. Returns the node where the prefix ends, pinned if `pin`, and the blocks that the
        tree adopted, a tail of `block_ids`.
        """
        assert block_ids, "there is nothing to store"
        self._tick()
        root = self.root(scope)
        node, num_known, num_kept = root, 0, 0
        for found, num_node_blocks in self._walk(root, token_ids, len(block_ids)):
            node = self._split(found, num_node_blocks)
            node.last_used = self._clock
            if node.in_tier:
                self._promote(node, list(block_ids[num_known : num_known + num_node_blocks]))
            else:
                num_kept += num_node_blocks
            num_known += num_node_blocks
        adopted = list(block_ids[num_kept:])
        if num_known < len(block_ids):
            run = token_ids[num_known * self.block_size : len(block_ids) * self.block_size]
            node = self._make_node(node, tuple(run), list(block_ids[num_known:]))
            self.num_evictable += len(node.block_ids)
        self.num_blocks += len(adopted)
        if pin:
            self._pin(node)
        else:
            self._note_leaf(node)
        return node, adopted

    def root(self, scope: str) -> Node:
        """Where a scope's prompts begin; made if need be, and then to be filled."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = self._make_node(None, (), [])
            self._scopes[root.node_id] = scope
        return root

    def evict(
        self, num_blocks: int, save: Callable[[list[int]], list[int] | None] | None = None
    ) -> list[int]:
        """Give up the least recently used blocks that nobody uses: at most `num_blocks`.

        `save` may give each of them a slot in the tier, where they stay part of the tree; or
        None, and they are lost with all that follows them.
        """
        evicted: list[int] = []
        for leaf, num_kept in self._oldest_leaves(num_blocks, in_tier=False):
            taken = leaf.block_ids[num_kept:]
            evicted += taken
            slots = None if save is None else save(taken)
            if slots is not None:
                self._split(leaf, num_kept)
                self._demote(leaf, slots)
            else:
                self._cut(leaf, num_kept)
        self.num_blocks -= len(evicted)
        return evicted

    def evict_slots(self, num_slots: int) -> list[int]:
        """Give up the least recently used slots that nobody uses: at most `num_slots`."""
        evicted: list[int] = []
        for leaf, num_kept in self._oldest_leaves(num_slots, in_tier=True):
            evicted += leaf.block_ids[num_kept:]
            self._cut(leaf, num_kept)
        return evicted

    def forget(self, node: Node) -> None:
        """Drop all of a path that is in the tier, unless somebody uses it: it can't be read."""
        in_tier = [at for at in path_to(node) if at.in_tier]  # up to where the blocks begin
        if in_tier and in_tier[-1].pins == 0:
            self.dropped_slots += in_tier[-1].block_ids
            self._cut(in_tier[-1], 0)

    def _oldest_leaves(self, count: int, *, in_tier: bool) -> Iterator[tuple[Node, int]]:
        """Leaves to take `count` blocks or slots from, each with how many of its own it keeps."""
        self._tick()
        heap = self._leaves[in_tier]
        while count > 0 and heap:
            entry = heappop(heap)
            if self._is_current(entry, in_tier):
                leaf = entry[2]
                assert leaf.block_ids, "a node without blocks was kept"  # it would come up for ever
                num_taken = min(count, len(leaf.block_ids))
                count -= num_taken
                yield leaf, len(leaf.block_ids) - num_taken

    def _walk(
        self, root: Node, token_ids: Sequence[int], max_blocks: int
    ) -> Iterator[tuple[Node, int]]:
        """Each node on the path of `token_ids`, with how many of its blocks match (at least 1).

        The caller may split the node that it was just given.
        """
        node, start, size, end = root, 0, self.block_size, max_blocks * self.block_size
        while start < end:
            child = node.children.get(self._key(token_ids, start // size))
            if child is None:
                return
            known = child.token_ids
            wanted = tuple(token_ids[start : min(start + len(known), end)])
            if wanted != known:
                at = range(size, len(wanted), size)
                equal = (wanted[i : i + size] == known[i : i + size] for i in at)
                yield child, 1 + sum(takewhile(bool, equal))
                return
            yield child, len(child.block_ids)
            node, start = child, start + len(known)

    def _key(self, token_ids: Sequence[int], block_index: int = 0) -> BlockTokens:
        start = block_index * self.block_size
        return tuple(token_ids[start : start + self.block_size])

    def _tick(self) -> None:
        self._clock += 1
        self.version += 1

    def _make_node(
        self, parent: Node | None, token_ids: tuple[int, ...], block_ids: list[int]
    ) -> Node:
        node = Node(self._next_node_id, parent, token_ids, block_ids)
        node.last_used = self._clock
        self._next_node_id += 1
        if parent is not None:
            parent.children[self._key(node.token_ids)] = node
            parent.num_resident += 1
            self._num_nodes += 1
        return node

    def _count_evictable(self, node: Node, change: int) -> None:
        if node.in_tier:
            self.num_evictable_slots += change
        else:
            self.num_evictable += change

    def _promote(self, node: Node, block_ids: list[int]) -> None:
        """The blocks of a node in the tier are in the pool again."""
        assert node.parent is not None
        self.dropped_slots += node.block_ids
        if node.pins == 0:
            self.num_evictable_slots -= len(block_ids)
            self.num_evictable += len(block_ids)
        node.block_ids, node.in_tier = block_ids, False
        node.parent.num_resident += 1

    def _demote(self, leaf: Node, slots: list[int]) -> None:
        """The blocks of an unpinned leaf are in the tier now."""
        assert leaf.parent is not None
        self.num_evictable -= len(slots)
        self.num_evictable_slots += len(slots)
        leaf.block_ids, leaf.in_tier = slots, True
        leaf.parent.num_resident -= 1
        self._note_leaf(leaf)
        self._note_leaf(leaf.parent)

    def _split(self, node: Node, num_blocks: int) -> Node:
        """The node that ends after `num_blocks` of `node`; `node` itself keeps the rest.

        Requests that pinned `node` hold a path through both, so both have its pins.
        """
        if num_blocks == len(node.block_ids):
            return node
        assert node.parent is not None
        if num_blocks == 0:
            return node.parent
        self.version += 1
        num_tokens = num_blocks * self.block_size
        upper = self._make_node(
            node.parent, node.token_ids[:num_tokens], node.block_ids[:num_blocks]
        )
        node.parent.num_resident -= 1  # one child took the place of another
        upper.pins, upper.last_used, upper.in_tier = node.pins, node.last_used, node.in_tier
        upper.num_resident = 0 if node.in_tier else 1
        node.token_ids = node.token_ids[num_tokens:]
        del node.block_ids[:num_blocks]
        upper.children[self._key(node.token_ids)] = node
        node.parent = upper
        return upper

    def _pin(self, node: Node) -> None:
        self._tick()
        for at in path_to(node):
            if at.pins == 0:
                self._count_evictable(at, -len(at.block_ids))
            at.pins += 1  # last_used moves at unpin: until then it does not matter

    def _cut(self, leaf: Node, num_kept: int) -> None:
        """Take an unpinned node's tail, and all below it, which can only be in the tier."""
        self._count_evictable(leaf, num_kept - len(leaf.block_ids))
        below = list(leaf.children.values())
        while below:
            node = below.pop()
            self.dropped_slots += node.block_ids
            self.num_evictable_slots -= len(node.block_ids)
            below += node.children.values()
            self._num_nodes -= 1
            node.parent, node.children, node.block_ids = None, {}, []
        leaf.children = {}
        if num_kept:
            leaf.token_ids = leaf.token_ids[: num_kept * self.block_size]
            del leaf.block_ids[num_kept:]
            self._note_leaf(leaf)
        else:
            self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._key(leaf.token_ids)]
        parent.num_resident -= not leaf.in_tier
        leaf.parent = None
        leaf.block_ids, leaf.token_ids = [], ()
        self._num_nodes -= 1
        if parent.parent is not None:
            self._note_leaf(parent)
        elif not parent.children:
            del self._roots[self._scopes.pop(parent.node_id)]

    def _note_leaf(self, node: Node) -> None:
        """Queue `node` for eviction, if it can be evicted now."""
        entry = (node.last_used, node.node_id, node)
        if not self._is_current(entry, node.in_tier):
            return
        heap = self._leaves[node.in_tier]
        heappush(heap, entry)
        if len(heap) > 64 + 2 * self._num_nodes:  # mostly stale: amortised, constant cost
            heap[:] = [entry for entry in heap if self._is_current(entry, node.in_tier)]
            heapify(heap)

    @staticmethod
    def _is_current(entry: Entry, in_tier: bool) -> bool:
        last_used, _, node = entry
        return (
            node.last_used == last_used
            and node.pins == 0
            and node.in_tier == in_tier
            and not (node.children if in_tier else node.num_resident)
            and node.parent is not None
        )

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before their children."""
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    def block_ids(self) -> list[int]:
        """Every block that the tree stores."""
        return [i for node in self.nodes() if not node.in_tier for i in node.block_ids]

    def slots(self) -> list[int]:
        """Every slot of the tier in which the tree stores something."""
        return [slot for node in self.nodes() if node.in_tier for slot in node.block_ids]

    def check(self) -> None:
        """Recount: edges are whole blocks under the right key, counters and pins add up."""
        check(self)
