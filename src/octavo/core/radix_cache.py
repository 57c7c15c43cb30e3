"""The prefix cache: a tree over token runs whose edges are whole blocks.

From a scope's root, each path spells tokens whose K/V are in the blocks along it. Edges hold the
real tokens and every hit compares them: there is no hash that two prompts could share. A node is
pinned while a live request uses it, and then so are its ancestors; what is unpinned can be
evicted, least recently used leaf first, from its tail, so that what stays is reachable (C20).

The tree stores block ids and counts pins. References belong to BlockPool: callers add one for
each block that `insert` adopts and drop it for each block that `evict` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        "last_used",
        "node_id",
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


class RadixCache:
    """Find, insert, pin, evict. Costs grow with the length of a path, never with the tree."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self.num_evictable = 0
        """Blocks in unpinned nodes."""
        self.version = 0
        """Moves with every change: a Match is good as long as it stands still."""
        self._roots: dict[str, Node] = {}
        self._scopes: dict[int, str] = {}  # of each root, by node id
        self._clock = 0
        self._num_nodes = 0
        self._next_node_id = 0
        # Entries (last_used, node_id, node); one is stale once its node was used again, got a
        # child or a pin, or left. Looked at only when it comes to the top: no upkeep on a hit.
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, token_ids: Sequence[int], max_tokens: int, scope: str = "") -> Match | None:
        """The longest cached prefix of at most `max_tokens` tokens; None if there is none."""
        root = self._roots.get(scope)
        if root is None:
            return None
        node, num_node_blocks, block_ids, num_evictable = root, 0, list[int](), 0
        for node, num_node_blocks in self._walk(root, token_ids, max_tokens // self.block_size):
            block_ids += node.block_ids[:num_node_blocks]
            num_evictable += num_node_blocks if node.pins == 0 else 0
        num_tokens = len(block_ids) * self.block_size
        tail = self._tail(node, num_node_blocks, token_ids[num_tokens:max_tokens])
        if not block_ids and tail is None:
            return None
        num_tokens += 0 if tail is None else tail.num_tokens
        end = node if block_ids else None
        return Match(end, num_node_blocks, tuple(block_ids), num_evictable, num_tokens, tail)

    def _tail(self, node: Node, num_node_blocks: int, token_ids: Sequence[int]) -> Tail | None:
        """Which block after this place begins with most of `token_ids`; None if there is none."""
        if num_node_blocks < len(node.block_ids):
            following = [(node.block_tokens[num_node_blocks], node.block_ids[num_node_blocks])]
        else:
            children = islice(reversed(node.children.values()), MAX_TAIL_CANDIDATES)
            following = [(child.block_tokens[0], child.block_ids[0]) for child in children]
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
                self.num_evictable += len(at.block_ids)
            at = at.parent
        self._note_leaf(node)

    def insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], scope: str = "", *, pin: bool
    ) -> tuple[Node, list[int]]:
        """Store a computed prefix, `block_ids[i]` holding the i-th block of `token_ids`.

        Where the tree has these tokens already it keeps its own block: the caller's is a twin
        and stays the caller's (C19). Returns the node where the prefix ends, pinned if `pin`,
        and the blocks that the tree adopted, a tail of `block_ids`.
        """
        assert block_ids, "there is nothing to store"
        self._tick()
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = self._make_node(None, [], [])
            self._scopes[root.node_id] = scope
        node, num_known = root, 0
        for found, num_node_blocks in self._walk(root, token_ids, len(block_ids)):
            node = self._split(found, num_node_blocks)
            node.last_used = self._clock
            num_known += num_node_blocks
        adopted = list(block_ids[num_known:])
        if adopted:
            keys = [self._key(token_ids, i) for i in range(num_known, len(block_ids))]
            node = self._make_node(node, keys, adopted)
            self.num_blocks += len(adopted)
            self.num_evictable += len(adopted)
        if pin:
            self._pin(node)
        else:
            self._note_leaf(node)
        return node, adopted

    def evict(self, num_blocks: int) -> list[int]:
        """Give up the least recently used blocks that nobody uses: at most `num_blocks`."""
        self._tick()
        evicted: list[int] = []
        while len(evicted) < num_blocks and self._leaves:
            entry = heappop(self._leaves)
            if not self._is_current(entry):
                continue
            leaf = entry[2]
            num_kept = max(0, len(leaf.block_ids) - (num_blocks - len(evicted)))
            evicted += leaf.block_ids[num_kept:]
            if num_kept:
                del leaf.block_ids[num_kept:], leaf.block_tokens[num_kept:]
                self._note_leaf(leaf)
            else:
                self._remove(leaf)
        self.num_blocks -= len(evicted)
        self.num_evictable -= len(evicted)
        return evicted

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
            self._num_nodes += 1
        return node

    def _split(self, node: Node, num_blocks: int) -> Node:
        """The node that ends after `num_blocks` of `node`; `node` itself keeps the rest.

        Requests that pinned `node` hold a path through both, so both have its pins.
        """
        if num_blocks == len(node.block_ids):
            return node
        self.version += 1
        upper = self._make_node(
            node.parent, node.block_tokens[:num_blocks], node.block_ids[:num_blocks]
        )
        upper.pins, upper.last_used = node.pins, node.last_used
        del node.block_tokens[:num_blocks], node.block_ids[:num_blocks]
        upper.children[node.block_tokens[0]] = node
        node.parent = upper
        return upper

    def _pin(self, node: Node) -> None:
        self._tick()
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.pins == 0:
                self.num_evictable -= len(at.block_ids)
            at.pins += 1  # last_used moves at unpin: until then it does not matter
            at = at.parent

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.block_tokens[0]]
        leaf.parent = None
        leaf.block_ids, leaf.block_tokens = [], []
        self._num_nodes -= 1
        if parent.parent is not None:
            self._note_leaf(parent)
        elif not parent.children:
            del self._roots[self._scopes.pop(parent.node_id)]

    def _note_leaf(self, node: Node) -> None:
        """Queue `node` for eviction, if it can be evicted now."""
        if node.pins or node.children or node.parent is None:
            return
        heappush(self._leaves, (node.last_used, node.node_id, node))
        if len(self._leaves) > 64 + 2 * self._num_nodes:  # mostly stale: amortised, constant cost
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapify(self._leaves)

    @staticmethod
    def _is_current(entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return (
            node.last_used == last_used
            and node.pins == 0
            and not node.children
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
        return [block_id for node in self.nodes() for block_id in node.block_ids]

    def check(self) -> None:
        """Recount: edges are whole blocks under the right key, counters and pins add up."""
        queued = {id(entry[2]) for entry in self._leaves if self._is_current(entry)}
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
            if node.pins == 0 and not node.children:
                assert id(node) in queued, "an unpinned leaf can't be found for eviction"
        assert all(root.children for root in self._roots.values()), "an empty root was kept"
        assert self._scopes == {root.node_id: scope for scope, root in self._roots.items()}
        block_ids = self.block_ids()
        assert len(set(block_ids)) == len(block_ids), "a block is in the tree twice"
        assert self._num_nodes == len(nodes), "the number of nodes is wrong"
        assert self.num_blocks == len(block_ids), "the number of cached blocks is wrong"
        evictable = sum(len(node.block_ids) for node in nodes if node.pins == 0)
        assert self.num_evictable == evictable, "the number of evictable blocks is wrong"
