"""What the scheduler believes of the tiers is so: it decides by it, and never asks them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beds.backends import kernels_of
from octavo.config import CacheConfig
from octavo.core.rates import Rates
from octavo.messages import ModelCosts, Transfer
from octavo.worker.tiers import Tiers

BLOCK = 4


@given(
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from(["store", "store", "load", "drop"]), st.integers(0, 7))),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_scheduler_knows_which_slots_are_in_ram(
    tmp_path: Path, num_ram: int, num_file: int, moves: list[tuple[str, int]]
) -> None:
    """R101: each tier has its own rate, so it matters where a slot is, after any transfers."""
    pool = kernels_of("reference").allocate_kv_cache(
        num_layers=1, num_blocks=1, block_size=BLOCK, num_kv_heads=1, head_dim=8
    )
    config = CacheConfig(
        ram_tier_memory=num_ram * pool.block_nbytes,
        file_tier_memory=num_file * pool.block_nbytes,
        file_tier_dir=str(tmp_path),
    )
    tiers = Tiers(config, pool)
    rates = Rates(tiers.num_slots, 64, ModelCosts(100, 1, (100.0, 1.0)))
    held: set[int] = set()
    for kind, slot in moves:
        if slot >= num_ram + num_file or (kind != "store" and slot not in held):
            continue
        transfer = Transfer(kind, slot if kind == "load" else 0, 0 if kind == "load" else slot)
        tiers.move([transfer])
        rates.follow([transfer])
        if kind != "load":
            held = held - {slot} if kind == "drop" else held | {slot}
        in_file = {slot for slot in held if rates.load_us([slot]) == [100.0]}
        assert in_file == set(tiers._rows[1])
        assert held - in_file == set(tiers._rows[0])
    tiers.close()
