"""What moving and computing K/V costs here, as measured step by step: for estimates (R101)."""

from __future__ import annotations

from typing import Any

from ..messages import Timing

WEIGHT = 0.25
"""Of the newest measurement in a moving average."""


class Rates:
    """Moving averages, all in microseconds; None where nothing was measured yet."""

    def __init__(self, num_ram_slots: int, token_budget: int) -> None:
        self.num_ram_slots = num_ram_slots
        self._token_budget = token_budget
        self._us_per_block: dict[tuple[str, int], float] = {}
        """By direction (store, load) and tier: 0 is RAM, 1 the file."""
        self._us_per_token: dict[int, float] = {}
        """By the bit length of the number of tokens in a step: long steps are cheaper by token."""

    def observe(self, timing: Timing) -> None:
        """Take in what a step took."""
        for kind, tier, num_blocks, us in timing.moved:
            _average(self._us_per_block, (kind, tier), us / num_blocks)
        if timing.num_tokens:
            bucket = timing.num_tokens.bit_length()
            _average(self._us_per_token, bucket, timing.compute_us / timing.num_tokens)

    def swap_us(self, num_blocks: int, num_kept: int) -> int | None:
        """To move so many blocks to the tiers, which keep `num_kept`, and back: RAM is used first,
        and when it is full each block that comes costs a write to the file."""
        tier = int(num_kept + num_blocks > self.num_ram_slots)
        ways = [self._us_per_block.get((kind, tier)) for kind in ("store", "load")]
        known = [us for us in ways if us is not None]
        return round(num_blocks * 2 * sum(known) / len(known)) if known else None

    def recompute_us(self, num_tokens: int) -> int | None:
        """To compute so many tokens again, in steps of the token budget."""
        wanted = min(num_tokens, self._token_budget).bit_length()
        if not self._us_per_token:
            return None
        nearest = min(self._us_per_token, key=lambda bucket: (abs(bucket - wanted), bucket))
        return round(num_tokens * self._us_per_token[nearest])


def _average(averages: dict[Any, float], key: Any, value: float) -> None:
    averages[key] = averages.get(key, value) * (1 - WEIGHT) + value * WEIGHT
