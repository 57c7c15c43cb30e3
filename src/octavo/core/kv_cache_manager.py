"""Who gets which blocks: allocation on demand, prefix hits, publishing, and giving back.

The only caller of BlockPool. Cached blocks that nobody uses count as available: they are evicted
before anybody hears "not now" (C23).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..config import CacheConfig
from ..errors import ConfigError
from ..request import Request
from .block_pool import BlockPool
from .event_log import EventLog, Reason
from .radix_cache import Match, Node, RadixCache


class KVCacheManager:
    """Block tables of requests over one pool and one prefix cache."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        event_log: EventLog,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(block_size)
        self._enable_prefix_caching = enable_prefix_caching
        self._event_log = event_log
        self._pinned: dict[int, Node] = {}  # where each live request's cached path ends, by id
        # The head of the queue asks again in every step that it waits; the answer is kept until
        # the tree changes (C113). Key: request id, reusable tokens, version of the tree.
        self._last_match: tuple[tuple[int, int, int], Match | None] = ((-1, -1, -1), None)

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones that nobody uses."""
        return self.pool.num_free + self.cache.num_evictable

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens of one request fill, the last one perhaps in part (R29)."""
        return -(-num_tokens // self.block_size)

    def num_blocks_owed(self, request: Request) -> int:
        """Blocks that a request still needs for the tokens that it knows now."""
        return self.num_blocks_for(request.num_tokens) - len(request.block_ids)

    def find_prefix(self, request: Request) -> Match | None:
        """The longest cached prefix of what `request` knows, or None.

        No longer than the request allows, which wants at least one token computed (C4).
        """
        num_reusable = request.num_reusable_tokens
        key = (request.request_id, num_reusable, self.cache.version)
        if self._last_match[0] != key:
            max_blocks = num_reusable // self.block_size
            match = self.cache.match(request.token_ids, max_blocks, request.cache_scope)
            self._last_match = (key, match)
        return self._last_match[1]

    def num_hit_blocks(self, request: Request) -> int:
        """Blocks that `request` would find in the cache now."""
        max_blocks = (request.num_tokens - 1) // self.block_size
        match = self.cache.match(request.token_ids, max_blocks, request.cache_scope)
        return 0 if match is None else len(match.block_ids)

    def num_yielded(self, victims: Iterable[Request], match: Match | None) -> int:
        """Blocks that become available if all of `victims` give theirs back, `match` left out.

        A block that nobody else holds is free then, or cached and evictable.
        """
        counts = Counter(block_id for victim in victims for block_id in victim.block_ids)
        hits = set() if match is None else set(match.block_ids)
        ref_counts = self.pool.ref_counts
        return sum(ref_counts[b] - n <= 1 for b, n in counts.items() if b not in hits)

    def start(self, request: Request, match: Match | None) -> None:
        """Begin a block table with the cached prefix that `find_prefix` gave."""
        assert not request.block_ids, "a request that starts holds blocks already"
        if match is None:
            request.num_computed_tokens = 0
            return
        self._pinned[request.request_id] = self.cache.pin(match)
        self.pool.share(match.block_ids)
        request.block_ids = list(match.block_ids)
        request.num_computed_tokens = len(match.block_ids) * self.block_size

    def allocate(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Grow the block table to hold `num_tokens` tokens; the new blocks, often none.

        Evicts cached blocks if need be. Returns None, having changed nothing, if that does not
        help: not now.
        """
        num_new = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if num_new <= 0:
            return ()
        if num_new > self.num_available:
            return None
        num_short = num_new - self.pool.num_free
        if num_short > 0:
            evicted = self.cache.evict(num_short)
            self.pool.release(evicted)
            self._event_log.record(Reason.EVICTED, None, len(evicted))
        block_ids = self.pool.allocate(num_new)
        assert block_ids is not None, "evicted blocks did not become free"
        request.block_ids += block_ids
        return tuple(block_ids)

    def publish(self, request: Request) -> None:
        """Let others reuse what a live request has computed: its full blocks, all written."""
        node = self._store(request, pin=True)
        if node is not None:
            before = self._pinned.get(request.request_id)
            self._pinned[request.request_id] = node
            if before is not None:
                self.cache.unpin(before)

    def free(self, request: Request, *, publish: bool = True) -> None:
        """Take a request's block table from it; its full computed blocks stay cached.

        With `publish` False nothing more is kept than was published before (a failed row).
        """
        if publish:
            self._store(request, pin=False)
        self.pool.release(request.block_ids)
        request.block_ids = []
        node = self._pinned.pop(request.request_id, None)
        if node is not None:
            self.cache.unpin(node)

    def _store(self, request: Request, *, pin: bool) -> Node | None:
        num_full = request.num_computed_tokens // self.block_size
        if not num_full or not self._enable_prefix_caching:
            return None
        node, adopted = self.cache.insert(
            request.token_ids, request.block_ids[:num_full], request.cache_scope, pin=pin
        )
        self.pool.share(adopted)
        return node

    def check(self, requests: Iterable[Request]) -> None:
        """Recount all references and pins; `requests` are all that may hold blocks."""
        self.pool.check()
        self.cache.check()
        requests = list(requests)
        counts = Counter(self.cache.block_ids())
        pins: Counter[Node] = Counter()
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids), (
                f"{request} holds a block twice"
            )
            counts.update(request.block_ids)
            at = self._pinned.get(request.request_id)
            while at is not None and at.parent is not None:
                pins[at] += 1
                at = at.parent
        assert self._pinned.keys() <= {request.request_id for request in requests}, (
            "a request left without letting go of its prefix"
        )
        expected = [counts[block_id] for block_id in range(self.pool.num_blocks)]
        assert self.pool.ref_counts == expected, "references are not those of tables and tree"
        for node in self.cache.nodes():
            assert node.pins == pins[node], "pins are not those of live requests"
            assert node.pins or all(expected[block_id] == 1 for block_id in node.block_ids), (
                "an evictable block is in use"
            )


class ContiguousKVManager(KVCacheManager):
    """The baseline of R32: each request takes room for max_model_len tokens when it starts.

    All reservations are of one size and BlockPool gives the lowest ids first, so each is a
    contiguous range, whatever was freed before; what is left over at the end serves nobody.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_model_len: int, event_log: EventLog
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=False,
            event_log=event_log,
        )
        self._num_reserved = super().num_blocks_for(max_model_len)
        if self._num_reserved > num_blocks:
            wanted = f"at least {self._num_reserved}, for one request of max_model_len tokens"
            raise ConfigError("num_kv_blocks", num_blocks, wanted)

    def num_blocks_for(self, num_tokens: int) -> int:
        return self._num_reserved if num_tokens else 0


def make_kv_manager(
    config: CacheConfig, num_blocks: int, max_model_len: int, event_log: EventLog
) -> KVCacheManager:
    """Paged, or the contiguous baseline, as the settings say."""
    if config.kv_reservation == "contiguous":
        return ContiguousKVManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            event_log=event_log,
        )
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        event_log=event_log,
    )
