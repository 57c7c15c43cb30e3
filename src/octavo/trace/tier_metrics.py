"""What /metrics tells of the tiers below the KV pool, and of the scheduler's decisions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..core.event_log import EventLog
from ..worker.executor import Executor

TIERS = ("ram", "file")
MOVES = ("store", "load", "demote")


class TierCollector:
    """Reads executor and event log at scrape time: nothing is counted twice, nothing for nobody."""

    def __init__(self, event_log: EventLog, executor: Executor, labels: dict[str, str]) -> None:
        """`labels`: those that every metric of this engine has."""
        self._event_log = event_log
        self._executor = executor
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        capacity = self._gauge("tier_capacity_bytes", "Size of a tier below the KV pool", "tier")
        used = self._gauge("tier_used_bytes", "Bytes of it that hold K/V", "tier")
        moved = self._counter("tier_moved_bytes", "K/V moved to or from a tier", "tier", "kind")
        blocks = self._counter("tier_moved_blocks", "The same in blocks", "tier", "kind")
        took = self._counter("tier_move_seconds", "Time that this took", "tier", "kind")
        speed = self._gauge("tier_bytes_per_second", "Bytes by time", "tier", "kind")
        use = self._executor.tier_use()
        if use is not None:
            size = use.block_nbytes
            for tier, (num_slots, num_used) in enumerate(zip(*use[1:3], strict=True)):
                self._add(capacity, num_slots * size, TIERS[tier])
                self._add(used, num_used * size, TIERS[tier])
            for (kind, tier), (num_blocks, seconds) in sorted(use.moved.items()):
                self._add(blocks, num_blocks, TIERS[tier], kind)
                if kind in MOVES:
                    self._add(moved, num_blocks * size, TIERS[tier], kind)
                    self._add(took, seconds, TIERS[tier], kind)
                    self._add(speed, num_blocks * size / max(seconds, 1e-9), TIERS[tier], kind)
        decisions = self._counter("decisions", "Of the scheduler, by reason", "reason")
        for reason, count in self._event_log.counts.items():
            self._add(decisions, count, reason.value)
        yield from (capacity, used, moved, blocks, took, speed, decisions)

    def _gauge(self, name: str, doc: str, *names: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"octavo:{name}", doc, labels=[*self._labels, *names])

    def _counter(self, name: str, doc: str, *names: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"octavo:{name}", doc, labels=[*self._labels, *names])

    def _add(
        self, metric: GaugeMetricFamily | CounterMetricFamily, value: float, *values: str
    ) -> None:
        metric.add_metric([*self._labels.values(), *values], value)
