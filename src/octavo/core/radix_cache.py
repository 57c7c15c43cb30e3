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
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

BlockTokens = tuple[int, ...]

MAX_TAIL_CANDIDATES = 64
"""Children that are looked at for a prompt that parts from all of them inside a block."""


class Node:
    """An edge into the tree: `block_tokens[i]` are the tokens whose K/V are in `block_ids[i]`."""

    __slots__ = (
        "block_ids",
        "block_tokens",
        "children",
        "in_tier",
        "last_used",
        "node_id",
        "num_resident",
        "parent",
        "pins",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        block_tokens: list[BlockTokens],
        block_ids: list[int],
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        """None for a root, and for a node that left the tree."""
        self.block_tokens = block_tokens
        self.block_ids = block_ids
        """Slots, if the node is in the tier."""
        self.in_tier = False
        self.num_resident = 0
        """Children that are not in the tier."""
        self.children: dict[BlockTokens, Node] = {}
        """By the tokens of their first block."""
        self.pins = 0
        """Live requests whose path ends here or below."""
        self.last_used = 0


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

    def match(self, token_ids: Sequence[int], max_tokens: int, scope: str = "") -> Match | None:
        """The longest cached prefix of at most `max_tokens` tokens; None if there is none."""
        root = self._roots.get(scope)
        if root is None:
            return None
        node, num_node_blocks, num_evictable = root, 0, 0
        block_ids, slots = list[int](), list[int]()
        for node, num_node_blocks in self._walk(root, token_ids, max_tokens // self.block_size):
            if node.in_tier:
                slots += node.block_ids[:num_node_blocks]
                continue
            block_ids += node.block_ids[:num_node_blocks]
            num_evictable += num_node_blocks if node.pins == 0 else 0
        num_blocks = len(block_ids) + len(slots)
        num_tokens = num_blocks * self.block_size
        tail = self._tail(node, num_node_blocks, token_ids[num_tokens:max_tokens])
        if not num_blocks and tail is None:
            return None
        num_tokens += 0 if tail is None else tail.num_tokens
        return Match(
            node if num_blocks else None,
            num_node_blocks,
            tuple(block_ids),
            num_evictable,
            num_tokens,
            tail,
            tuple(slots),
        )

    def _tail(self, node: Node, num_node_blocks: int, token_ids: Sequence[int]) -> Tail | None:
        """Which block after this place begins with most of `token_ids`; None if there is none."""
        if node.in_tier:
            return None
        if num_node_blocks < len(node.block_ids):
            following = [(node.block_tokens[num_node_blocks], node.block_ids[num_node_blocks])]
        else:
            children = islice(reversed(node.children.values()), MAX_TAIL_CANDIDATES)
            following = [
                (child.block_tokens[0], child.block_ids[0])
                for child in children
                if not child.in_tier
            ]
        best: Tail | None = None
        for block_tokens, block_id in following:
            num_equal = 0
            for known, wanted in zip(block_tokens, token_ids, strict=False):
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
        at: Node | None = node
        while at is not None and at.parent is not None:
            assert at.pins > 0, "a node was unpinned twice"
            at.pins -= 1
            at.last_used = self._clock
            if at.pins == 0:
                self._count_evictable(at, len(at.block_ids))
                self._note_leaf(at)
            at = at.parent

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
            keys = [self._key(token_ids, i) for i in range(num_known, len(block_ids))]
            node = self._make_node(node, keys, list(block_ids[num_known:]))
            self.num_evictable += len(keys)
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
            root = self._roots[scope] = self._make_node(None, [], [])
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
        top: Node | None = None
        at: Node | None = node
        while at is not None and at.in_tier:
            top, at = at, at.parent
        if top is not None and top.pins == 0:
            self.dropped_slots += top.block_ids
            self._cut(top, 0)

    def _oldest_leaves(self, count: int, *, in_tier: bool) -> Iterator[tuple[Node, int]]:
        """Leaves to take `count` blocks or slots from, each with how many of its own it keeps."""
        self._tick()
        heap = self._leaves[in_tier]
        while count > 0 and heap:
            entry = heappop(heap)
            if self._is_current(entry, in_tier):
                leaf = entry[2]
                num_taken = min(count, len(leaf.block_ids))
                count -= num_taken
                yield leaf, len(leaf.block_ids) - num_taken

    def _walk(
        self, root: Node, token_ids: Sequence[int], max_blocks: int
    ) -> Iterator[tuple[Node, int]]:
        """Each node on the path of `token_ids`, with how many of its blocks match (at least 1).

        The caller may split the node that it was just given.
        """
        node, position = root, 0
        while position < max_blocks:
            child = node.children.get(self._key(token_ids, position))
            if child is None:
                return
            limit = min(len(child.block_ids), max_blocks - position)
            whole = limit == len(child.block_ids)
            num_matched = 1
            while (
                num_matched < limit
                and self._key(token_ids, position + num_matched) == child.block_tokens[num_matched]
            ):
                num_matched += 1
            yield child, num_matched
            if num_matched < limit or not whole:
                return
            node, position = child, position + num_matched

    def _key(self, token_ids: Sequence[int], block_index: int) -> BlockTokens:
        start = block_index * self.block_size
        return tuple(token_ids[start : start + self.block_size])

    def _tick(self) -> None:
        self._clock += 1
        self.version += 1

    def _make_node(
        self, parent: Node | None, block_tokens: list[BlockTokens], block_ids: list[int]
    ) -> Node:
        node = Node(self._next_node_id, parent, block_tokens, block_ids)
        node.last_used = self._clock
        self._next_node_id += 1
        if parent is not None:
            parent.children[block_tokens[0]] = node
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
        upper = self._make_node(
            node.parent, node.block_tokens[:num_blocks], node.block_ids[:num_blocks]
        )
        node.parent.num_resident -= 1  # one child took the place of another
        upper.pins, upper.last_used, upper.in_tier = node.pins, node.last_used, node.in_tier
        upper.num_resident = 0 if node.in_tier else 1
        del node.block_tokens[:num_blocks], node.block_ids[:num_blocks]
        upper.children[node.block_tokens[0]] = node
        node.parent = upper
        return upper

    def _pin(self, node: Node) -> None:
        self._tick()
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.pins == 0:
                self._count_evictable(at, -len(at.block_ids))
            at.pins += 1  # last_used moves at unpin: until then it does not matter
            at = at.parent

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
            del leaf.block_ids[num_kept:], leaf.block_tokens[num_kept:]
            self._note_leaf(leaf)
        else:
            self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.block_tokens[0]]
        parent.num_resident -= not leaf.in_tier
        leaf.parent = None
        leaf.block_ids, leaf.block_tokens = [], []
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
        queued = {
            id(entry[2])
            for in_tier, heap in enumerate(self._leaves)
            for entry in heap
            if self._is_current(entry, bool(in_tier))
        }
        nodes = list(self.nodes())
        for node in nodes:
            parent = node.parent
            assert parent is not None, "a node that left is still in the tree"
            assert node.block_ids, "an empty node is in the tree"
            assert len(node.block_ids) == len(node.block_tokens), "a block lost its tokens"
            assert parent.children.get(node.block_tokens[0]) is node, "a node has the wrong key"
            for tokens in node.block_tokens:
                assert len(tokens) == self.block_size, "an edge holds a half-filled block"
            assert node.pins >= sum(child.pins for child in node.children.values()), (
                "a pinned node has an unpinned ancestor"
            )
            resident = [child for child in node.children.values() if not child.in_tier]
            assert node.num_resident == len(resident), "the number of resident children is wrong"
            assert not (node.in_tier and resident), "a block is behind one that is in the tier"
            if node.pins == 0 and not (node.children if node.in_tier else resident):
                assert id(node) in queued, "an unpinned leaf can't be found for eviction"
        assert all(root.children for root in self._roots.values()), "an empty root was kept"
        assert self._scopes == {root.node_id: scope for scope, root in self._roots.items()}
        block_ids = self.block_ids()
        assert len(set(block_ids)) == len(block_ids), "a block is in the tree twice"
        assert self._num_nodes == len(nodes), "the number of nodes is wrong"
        assert self.num_blocks == len(block_ids), "the number of cached blocks is wrong"
        slots = self.slots()
        assert len(set(slots)) == len(slots), "a slot is in the tree twice"
        evictable = [0, 0]
        for node in nodes:
            evictable[node.in_tier] += len(node.block_ids) if node.pins == 0 else 0
        assert self.num_evictable == evictable[0], "the number of evictable blocks is wrong"
        assert self.num_evictable_slots == evictable[1], "the number of evictable slots is wrong"
