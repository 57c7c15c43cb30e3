"""Who gets which blocks: allocation on demand, prefix hits, publishing, and giving back.

The only caller of BlockPool. Cached blocks that nobody uses count as available: they are evicted
before anybody hears "not now" (C23).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

from ..config import CacheConfig
from ..errors import ConfigError
from ..messages import KeptRun, Transfer
from ..request import Request, Status, Swapped
from .block_pool import BlockPool
from .event_log import EventLog, Reason
from .kept_prefixes import export, graft
from .limits import Limits
from .radix_cache import Match, Node, Place, RadixCache, Tail, path_to
from .rates import Rates


class KVCacheManager:
    """Block tables of requests over one pool and one prefix cache."""

    def __init__(
        self, config: CacheConfig, limits: Limits, rates: Rates, event_log: EventLog
    ) -> None:
        """Raises ConfigError if the pool can't hold what one request takes."""
        self.block_size = config.block_size
        self._max_model_len = limits.max_model_len
        num_blocks, num_wanted = limits.kv_capacity // self.block_size, self.num_blocks_for(1)
        if num_wanted > num_blocks:
            wanted = f"at least {num_wanted}, for one request of max_model_len tokens"
            raise ConfigError("num_kv_blocks", num_blocks, wanted)
        self.pool = BlockPool(num_blocks)
        self.slots = BlockPool(sum(rates.num_slots))
        """Places for a block each in the tiers below the pool, the fastest tier first."""
        self.cache = RadixCache(config.block_size)
        self._enable_prefix_caching = config.enable_prefix_caching
        self.event_log = event_log
        self._rates = rates
        self._pinned: dict[int, Node] = {}  # where each live request's cached path ends, by id
        # The head of the queue asks again in every step that it waits; the answer is kept until
        # the tree changes (C113). Key: request id, reusable tokens, version of the tree.
        self._last_match: tuple[tuple[int, int, int], Match | None] = ((-1, -1, -1), None)
        self._places: dict[int, Place] = {}
        """Where waiting requests leave the tree, as found when they were last asked for, by id."""
        self._transfers: list[Transfer] = []

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

    def take_transfers(self) -> tuple[Transfer, ...]:
        """What has to move before the next step computes; asked for once a step."""
        transfers, self._transfers = tuple(self._transfers), []
        if transfers:
            self._rates.follow(transfers)
        return transfers

    def find_prefix(self, request: Request) -> Match | None:
        """The longest prefix of what `request` knows that is computed already, or None: in the
        cache, in the tiers, or in the blocks of a running leader.

        No longer than the request allows, which wants at least one token computed (C4).
        """
        request.take_scores()
        num_reusable = request.num_reusable_tokens
        key = (request.request_id, num_reusable, self.cache.version)
        if self._last_match[0] != key:
            self._last_match = (key, self._match(request))
        match, leader = self._last_match[1], request.leader
        if request.swapped is not None:
            return _resumed(request.swapped, match)
        if leader is None or not leader.block_ids:
            return match
        return self._fork(request, leader, match)

    def _match(self, request: Request) -> Match | None:
        """What is cached, less what would take longer to read from the tiers than to compute."""
        token_ids, place = request.token_ids, self._find_place(request)
        match = self.cache.match_at(place, token_ids, request.num_reusable_tokens)
        if match is None or not match.slots:
            return match
        num_read = self._rates.num_worth_loading(match.slots, self.block_size)
        left = match.slots[num_read:]
        if not left:
            return match
        load = round(sum(self._rates.load_us(left)))
        self.event_log.record(Reason.TIER_SLOW, request.request_id, len(left), load)
        self._rates.doubt()
        num_tokens = (len(match.block_ids) + num_read) * self.block_size
        return self.cache.match(token_ids, num_tokens, request.cache_scope)

    def num_prompt_tokens_to_come(self, request: Request) -> int:
        """Tokens of its prompt that the first of its n answers is about to compute (R34)."""
        leader = request.leader
        if leader is None or leader.status is not Status.RUNNING or request.num_output_tokens:
            return 0
        return max(0, request.num_prompt_tokens - leader.num_computed_tokens)

    def _fork(self, request: Request, leader: Request, match: Match | None) -> Match | None:
        """Share the prompt that `leader` computed: its full blocks, and a copy of a begun one."""
        num_shared = min(leader.num_computed_tokens, request.num_prompt_tokens)
        num_shared = min(num_shared, request.num_reusable_tokens)
        if num_shared <= (0 if match is None else match.num_tokens):
            return match
        one, other = ((r.cache_scope, r.token_ids[:num_shared]) for r in (request, leader))
        assert one == other, f"{request} has another prompt than {leader}, its leader"
        num_full, num_rest = divmod(num_shared, self.block_size)
        tail = Tail(leader.block_ids[num_full], num_rest) if num_rest else None
        if not self._enable_prefix_caching:
            block_ids = tuple(leader.block_ids[:num_full])
            return Match(None, 0, block_ids, 0, num_shared, tail)
        if match is None:
            match = Match(None, 0, (), 0, 0)
        if len(match.block_ids) != num_full:  # its full blocks are not published yet
            return match
        return match._replace(num_tokens=num_shared, tail=tail)

    def num_hit_blocks(self, request: Request) -> int:
        """Blocks that `request` would find in the cache now."""
        return self._find_place(request).num_blocks

    def _find_place(self, request: Request) -> Place:
        request_id, most = request.request_id, request.num_reusable_tokens
        before = self._places.get(request_id)
        place = self.cache.find(request.token_ids, most, request.cache_scope, before)
        self._places[request_id] = place
        return place

    def num_yielded(self, victims: Iterable[Request], match: Match | None) -> int:
        """Blocks that become available if all of `victims` give theirs back, `match` left out.

        A block that nobody else holds is free then, or cached and evictable: with a prefix cache,
        what two requests share is in the tree as well.
        """
        counts = Counter(block_id for victim in victims for block_id in victim.block_ids)
        hits = set() if match is None else set(match.block_ids)
        ref_counts, most = self.pool.ref_counts, int(self._enable_prefix_caching)
        return sum(ref_counts[b] - n <= most for b, n in counts.items() if b not in hits)

    def start(self, request: Request, match: Match | None) -> None:
        """Begin a block table with the prefix that `find_prefix` gave; a begun block is copied,
        since the request writes on in it. There must be a block for that."""
        assert not request.block_ids, "a request that starts holds blocks already"
        self._places.pop(request.request_id, None)
        if match is None:
            request.num_computed_tokens = 0
            return
        if match.node is not None:
            self._pinned[request.request_id] = self.cache.pin(match)
        self.pool.share(match.block_ids)
        request.block_ids = list(match.block_ids)
        request.num_computed_tokens = match.num_tokens
        if match.tail is not None or match.slots:
            targets = self.allocate(request, match.num_tokens)
            assert targets, "admission promised blocks for what is copied and loaded"
            if match.tail is not None:
                self._transfers.append(Transfer("copy", match.tail.block_id, targets[0]))
            for slot, block_id in zip(match.slots, targets, strict=match.tail is None):
                self._transfers.append(Transfer("load", slot, block_id))
            if match.slots:
                self.event_log.record(Reason.LOADED, request.request_id, len(match.slots))
        self.drop_swapped(request)

    def num_shared_tokens(self, request: Request) -> int:
        """Tokens that stay computed without it for sure, since others use their blocks, too."""
        ref_counts = self.pool.ref_counts  # the tree's, its own, and one more
        shared = takewhile(lambda block_id: ref_counts[block_id] > 2, request.block_ids)
        return min(sum(1 for _ in shared) * self.block_size, request.num_computed_tokens)

    @property
    def num_slots_left(self) -> int:
        """Of the tiers: free, or cached prefixes that would give way."""
        return self.slots.num_free + self.cache.num_evictable_slots

    def swap_out(self, request: Request) -> bool:
        """Keep K/V of a request in a tier and make its blocks available; False, having done
        nothing, if there is no room."""
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        slots = self._take_slots(num_blocks)
        if slots is None:
            num_left = self.num_slots_left
            self.event_log.record(Reason.TIERS_FULL, request.request_id, num_blocks, num_left)
            return False
        for block_id, slot in zip(request.block_ids, slots, strict=False):
            self._transfers.append(Transfer("store", block_id, slot))
        request.swapped = Swapped(slots, request.num_computed_tokens)
        self.event_log.record(Reason.SWAPPED, request.request_id, num_blocks)
        self._release(request)
        return True

    def drop_swapped(self, request: Request) -> None:
        """Give up what is kept in a tier of a request, because it is back or has ended."""
        self._places.pop(request.request_id, None)
        if request.swapped is not None:
            self._release_slots(request.swapped.slots)
            request.swapped = None

    def _take_slots(self, num_slots: int) -> list[int] | None:
        """Slots of the tiers, cached prefixes giving way; None if there are not so many."""
        if num_slots > self.num_slots_left:
            return None
        num_short = num_slots - self.slots.num_free
        if num_short > 0:
            dropped = self.cache.evict_slots(num_short)
            self._release_slots(dropped)
            self.event_log.record(Reason.DROPPED, None, len(dropped))
        return self.slots.allocate(num_slots)

    def _release_slots(self, slots: list[int]) -> None:
        self.slots.release(slots)
        self._transfers += [Transfer("drop", slot, slot) for slot in slots]

    def _save(self, block_ids: list[int]) -> list[int] | None:
        """Keep cached blocks that are evicted in a tier, if there is room."""
        slots = self._take_slots(len(block_ids))
        if slots is not None:
            for i in reversed(range(len(slots))):  # what is stored last stays in RAM for longest
                self._transfers.append(Transfer("store", block_ids[i], slots[i]))
            self.event_log.record(Reason.SAVED, None, len(slots))
        return slots

    def _release_dropped(self) -> None:
        self._release_slots(self.cache.dropped_slots)
        self.cache.dropped_slots.clear()

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
            evicted = self.cache.evict(num_short, self._save if self.slots.num_blocks else None)
            self.pool.release(evicted)
            self._release_dropped()
            self.event_log.record(Reason.EVICTED, None, len(evicted))
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

        With `publish` False nothing more is kept than was published before (a failed row), and
        what it was to read from the tiers is given up.
        """
        if publish:
            self._store(request, pin=False)
        node = self._release(request)
        if not publish and node is not None:
            self.cache.forget(node)
            self._release_dropped()

    def _release(self, request: Request) -> Node | None:
        """Let go of a request's blocks and of its path in the cache, which is returned."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        node = self._pinned.pop(request.request_id, None)
        if node is not None:
            self.cache.unpin(node)
        return node

    def _store(self, request: Request, *, pin: bool) -> Node | None:
        num_full = request.num_computed_tokens // self.block_size
        if not num_full or not self._enable_prefix_caching:
            return None
        node, adopted = self.cache.insert(
            request.token_ids, request.block_ids[:num_full], request.cache_scope, pin=pin
        )
        self.pool.share(adopted)
        self._release_dropped()
        return node

    def export_prefixes(self) -> list[KeptRun]:
        """What is worth keeping beyond this process: as much as the tiers of the next one hold."""
        return export(self.cache, self.slots.num_blocks)

    def import_prefixes(self, runs: list[KeptRun]) -> None:
        """Begin with these; they are in the first slots of the tiers, in this order."""
        slots = self.slots.allocate(sum(len(run.places) for run in runs))
        assert slots == [slot for run in runs for slot in run.places], "slots are counted up"
        self._rates.follow(Transfer("store", -1, slot) for slot in reversed(slots))
        graft(self.cache, runs)

    def check(self, requests: Iterable[Request], waiting: Iterable[Request] = ()) -> None:
        """Recount all references and pins; `requests` are all that may hold blocks, `waiting`
        those that may have K/V in a tier."""
        self.pool.check()
        self.slots.check()
        slots = Counter(self.cache.slots())
        waiting_ids = set[int]()
        for request in waiting:
            waiting_ids.add(request.request_id)
            slots.update(() if request.swapped is None else request.swapped.slots)
        assert self._places.keys() <= waiting_ids, "a place is kept of one that does not wait"
        expected = [slots[slot] for slot in range(self.slots.num_blocks)]
        assert self.slots.ref_counts == expected, "slots are not those of tree and waiting requests"
        assert not self.cache.dropped_slots, "slots left the tree and were not given back"
        self.cache.check()
        requests = list(requests)
        counts = Counter(self.cache.block_ids())
        pins: Counter[Node] = Counter()
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids), (
                f"{request} holds a block twice"
            )
            counts.update(request.block_ids)
            if request.request_id in self._pinned:
                pins.update(path_to(self._pinned[request.request_id]))
        assert self._pinned.keys() <= {request.request_id for request in requests}, (
            "a request left without letting go of its prefix"
        )
        expected = [counts[block_id] for block_id in range(self.pool.num_blocks)]
        assert self.pool.ref_counts == expected, "references are not those of tables and tree"
        for node in self.cache.nodes():
            assert node.pins == pins[node], "pins are not those of live requests"
            assert node.pins or node.in_tier or all(expected[i] == 1 for i in node.block_ids), (
                "an evictable block is in use"
            )


def _resumed(swapped: Swapped, match: Match | None) -> Match:
    """A swapped request's K/V: what the cache still has of it in the pool, the rest as kept."""
    if match is None or match.num_tokens < swapped.num_tokens:
        match = Match(None, 0, (), 0, 0) if match is None else match
        slots = tuple(swapped.slots[len(match.block_ids) :])
        return match._replace(num_tokens=swapped.num_tokens, tail=None, slots=slots)
    return match


class ContiguousKVManager(KVCacheManager):
    """The baseline of R32: each request takes room for max_model_len tokens when it starts.

    All reservations are of one size and BlockPool gives the lowest ids first, so each is a
    contiguous range, whatever was freed before; what is left over at the end serves nobody.
    """

    def num_blocks_for(self, num_tokens: int) -> int:
        return super().num_blocks_for(self._max_model_len) if num_tokens else 0

    def num_prompt_tokens_to_come(self, request: Request) -> int:
        return 0

    def _fork(self, request: Request, leader: Request, match: Match | None) -> Match | None:
        return None  # its room is its own


KV_MANAGERS = {"paged": KVCacheManager, "contiguous": ContiguousKVManager}
