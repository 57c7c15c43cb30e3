"""/metrics of a real engine: what its tiers hold and moved, and what its scheduler decided."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.core.event_log import Reason
from octavo.engine.build import build_engine

PROMPTS = [[3 + (7 * i + 5 * j) % (VOCAB_SIZE - 3) for j in range(30)] for i in range(6)]


def values(llm: LLM) -> dict[str, float]:
    """Every sample of our own, by name and the labels that only it has."""
    found = {}
    for line in llm._engine.metrics.render().decode().splitlines():
        match = re.fullmatch(r"octavo:(\w+)\{(.*)\} (\S+)", line)
        if match:
            labels = [
                x for x in match[2].split(",") if not x.startswith(("engine=", "model_name="))
            ]
            found[match[1] + "".join(sorted(labels))] = float(match[3])
    return found


def test_metrics_tell_what_the_tiers_hold_and_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes within the budget, what went in and came back, at which speed; as the tiers count."""
    # Somebody reads the metrics, as of a server.
    monkeypatch.setattr("octavo.engine.llm.build_engine", lambda config, **_: build_engine(config))
    llm = LLM(
        str(write_tiny_gguf(tmp_path / "tiny.gguf")),
        backend="reference",
        max_model_len=64,
        block_size=8,
        num_kv_blocks=14,
        preemption_mode="swap",
        ram_tier_memory=1 << 15,
        file_tier_memory=1 << 17,
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    fresh = values(llm)
    assert fresh['tier_used_bytestier="ram"'] == fresh['tier_used_bytestier="file"'] == 0
    for _ in range(3):
        llm.generate(PROMPTS, params, use_tqdm=False)
    now = values(llm)
    tiers = llm._engine.core.executor._runner.tiers  # type: ignore[attr-defined]
    size = tiers.block_nbytes
    assert now['tier_capacity_bytestier="ram"'] == (1 << 15) // size * size
    assert now['tier_capacity_bytestier="file"'] == (1 << 17) // size * size
    num_used = tiers.use().num_used
    assert now['tier_used_bytestier="ram"'] == num_used[0] * size > 0
    assert now['tier_used_bytestier="file"'] == num_used[1] * size > 0
    for kind, tier in (("store", "file"), ("demote", "file"), ("load", "file"), ("load", "ram")):
        labels = f'kind="{kind}"tier="{tier}"'
        num_bytes = now["tier_moved_bytes_total" + labels]
        assert num_bytes == now["tier_moved_blocks_total" + labels] * size > 0
        seconds = now["tier_move_seconds_total" + labels]
        assert seconds > 0
        assert abs(now["tier_bytes_per_second" + labels] * seconds - num_bytes) < 1e-3 * num_bytes
    moved = {key: num for key, (num, _) in tiers.use().moved.items()}
    stored = moved["store", 0] + moved["store", 1]
    dropped = moved.get(("drop", 0), 0) + moved.get(("drop", 1), 0)
    assert stored - dropped == sum(num_used), "what came and did not go is there"
    counts = llm._engine.core.scheduler.event_log.counts
    for reason in Reason:
        assert now[f'decisions_totalreason="{reason.value}"'] == counts[reason]
    assert counts[Reason.SWAPPED] > 0
    assert counts[Reason.LOADED] > 0
    llm.close()
    assert 'tier_used_bytestier="ram"' not in values(llm), "a closed engine has none"
