"""What the scheduler believes of the tiers is so: it decides by it, and never asks them."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

from beds.backends import kernels_of
from octavo.config import CacheConfig
from octavo.core.rates import Rates
from octavo.messages import ModelCosts, Transfer
from octavo.worker.tiers import Tiers


def test_the_scheduler_knows_which_slots_are_in_ram(tmp_path: Path) -> None:
    """R101: each tier has its own rate, so it matters where a slot is, after any transfers."""
    for num_ram, num_file in product(range(4), range(4)):
        pool = kernels_of("reference").allocate_kv_cache(
            num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8
        )
        config = CacheConfig(
            ram_tier_memory=num_ram * pool.block_nbytes,
            file_tier_memory=num_file * pool.block_nbytes,
            file_tier_dir=str(tmp_path) if num_file else None,
        )
        tiers = Tiers(config, pool)
        rates = Rates(tiers.num_slots, 64, ModelCosts(100, 1, (100.0, 1.0)))
        rng, held = random.Random(num_ram), set[int]()
        for _ in range(200 if num_ram + num_file else 0):
            kind, slot = rng.choice(("store", "load", "drop")), rng.randrange(num_ram + num_file)
            if kind == "store":
                held.add(slot)
            elif slot not in held:
                continue
            elif kind == "drop":
                held.remove(slot)
            transfer = Transfer(kind, slot, 0) if kind == "load" else Transfer(kind, 0, slot)
            tiers.move([transfer])
            rates.follow([transfer])
            in_file = {slot for slot in held if rates.load_us([slot]) == [100.0]}
            assert in_file == set(tiers._rows[1])
            assert held - in_file == set(tiers._rows[0])
        tiers.close()
