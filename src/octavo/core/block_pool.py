"""The blocks of the KV pool and who holds them: the only place where a reference count changes."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush


class BlockPool:
    """`num_blocks` blocks, each free or referenced.

    A block is referenced once by every block table that holds it, and once by the prefix cache
    while it is stored there. Free blocks leave in order of their ids, lowest first, whatever
    the order in which they came back: memory that was never needed is never touched.
    """

    __slots__ = ("_free", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks))  # sorted, so already a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks with one reference each, or none at all and return None."""
        if num_blocks > len(self._free):
            return None
        block_ids = [heappop(self._free) for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which somebody holds already."""
        for block_id in block_ids:
            assert self.ref_counts[block_id] > 0, f"block {block_id} is free and can't be shared"
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each of these blocks; the last one frees the block."""
        for block_id in block_ids:
            count = self.ref_counts[block_id]
            assert count > 0, f"block {block_id} was freed twice"
            self.ref_counts[block_id] = count - 1
            if count == 1:
                heappush(self._free, block_id)

    def check(self) -> None:
        """Each block is free or referenced, never both, never neither; the heap is one."""
        free = set(self._free)
        held = {block_id for block_id, count in enumerate(self.ref_counts) if count > 0}
        assert len(self.ref_counts) == self.num_blocks, "the pool changed its size"
        assert min(self.ref_counts, default=0) >= 0, "a reference count is below zero"
        assert len(free) == len(self._free), "a block was freed twice"
        assert not free & held, "a free block is still referenced"
        assert len(free) + len(held) == self.num_blocks, "a block leaked"
        ordered = list(self._free)
        heapify(ordered)
        assert ordered == self._free, "free blocks are out of order"
