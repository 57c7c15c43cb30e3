"""What moving and computing K/V costs: measured step by step, by the book until then (R101)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from ..messages import ModelCosts, Timing, Transfer

WEIGHT = 0.25
"""Of the newest measurement in a moving average."""
MOST = 4
"""So many times the average is the most that one measurement may say: the machine may have been
busy elsewhere. What moving blocks takes by the book counts as the first measurement."""
DOUBT = 0.98
"""What is believed too slow to be used is not measured again: believed by so much each time."""


class Rates:
    """Moving averages, all in microseconds, and which slots are in RAM."""

    def __init__(self, num_slots: tuple[int, int], token_budget: int, costs: ModelCosts) -> None:
        self.num_slots = num_slots
        """Of RAM, and of the file."""
        self._token_budget = token_budget
        self._costs = costs
        self._us_per_block: dict[tuple[str, int], float] = {}
        """By direction (store, load) and tier: 0 is RAM, 1 the file."""
        self._us_per_token: dict[int, float] = {}
        """By the bit length of the number of tokens in a step: long steps are cheaper by token."""
        self._in_ram: dict[int, None] = {}
        """Slots, oldest first; all others that are in use are in the file."""

    def observe(self, timing: Timing) -> None:
        """Take in what a step took."""
        for kind, tier, num_blocks, us in timing.moved:
            before = self._block_us(kind, tier)
            self._us_per_block[kind, tier] = _average(before, us / num_blocks)
        if timing.num_tokens:
            bucket, us_each = timing.num_tokens.bit_length(), timing.compute_us / timing.num_tokens
            before = self._us_per_token.get(bucket, us_each)
            self._us_per_token[bucket] = _average(before, us_each)

    def follow(self, transfers: Iterable[Transfer]) -> None:
        """Know where slots are, as the tiers decide it: RAM holds what was stored last."""
        for kind, _, slot in transfers:
            if kind in ("store", "drop"):
                self._in_ram.pop(slot, None)
            if kind == "store" and self.num_slots[0]:
                if len(self._in_ram) == self.num_slots[0]:
                    del self._in_ram[next(iter(self._in_ram))]
                self._in_ram[slot] = None

    def swap_us(self, num_blocks: int, num_kept: int) -> int:
        """To move so many blocks to the tiers, which keep `num_kept`, and back: RAM is used first,
        and when it is full each block that comes costs a write to the file."""
        tier = int(num_kept + num_blocks > self.num_slots[0])
        return round(num_blocks * (self._block_us("store", tier) + self._block_us("load", tier)))

    def load_us(self, slots: Iterable[int]) -> list[float]:
        """To read each of these slots."""
        return [self._block_us("load", int(slot not in self._in_ram)) for slot in slots]

    def num_worth_loading(self, slots: Sequence[int], block_size: int) -> int:
        """How many of these, from the first on, to read in order to save most: after what is not
        read all has to be computed. Before anything was computed here: all."""
        if not self._us_per_token:
            return len(slots)
        each = self.recompute_us(len(slots) * block_size) / len(slots)
        saved = [0, *accumulate(each - us for us in self.load_us(slots))]
        return saved.index(max(saved))

    def _block_us(self, kind: str, tier: int) -> float:
        by_the_book = self._costs.block_nbytes / self._costs.bytes_per_us[tier]
        return self._us_per_block.get((kind, tier), by_the_book)

    def doubt(self) -> None:
        """A tier was not used, being slow: it will be tried again some day."""
        self._us_per_block = {key: us * DOUBT for key, us in self._us_per_block.items()}

    def recompute_us(self, num_tokens: int) -> int:
        """To compute so many tokens again, in steps of the token budget."""
        if not self._us_per_token:
            return round(num_tokens * self._costs.flops_per_token / self._costs.flops_per_us)
        wanted = min(num_tokens, self._token_budget).bit_length()
        nearest = min(self._us_per_token, key=lambda bucket: (abs(bucket - wanted), bucket))
        return round(num_tokens * self._us_per_token[nearest])


def _average(before: float, value: float) -> float:
    return before * (1 - WEIGHT) + min(value, MOST * before) * WEIGHT
