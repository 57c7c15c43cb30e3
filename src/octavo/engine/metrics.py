"""Prometheus metrics under vLLM's names, in a registry of their own.

Gauges and totals that the scheduler already counts are read from it at scrape time; the rest are
histograms and counters of whole requests. Times come from one monotonic clock, in seconds; a
preemption counts into the inter-token latency of the token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ..core.stats import SchedulerStats
    from .output_processor import Answer

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = (1, 8, *(2**exponent for exponent in range(4, 15)))
LENGTH_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics:
    """Counts what an engine does; `render` is the text that /metrics serves."""

    def __init__(self, model_name: str) -> None:
        # Imported here: it brings a web server along, and engines of one process have no scraper.
        import prometheus_client

        self._prometheus = prometheus_client
        self.registry = prometheus_client.CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.corrupted_requests = self._counter(
            "corrupted_requests", "Requests that a fault of their own row ended"
        )
        self.request_success = prometheus_client.Counter(
            "vllm:request_success",
            "Requests ended, by reason",
            [*self.labels, "finished_reason"],
            registry=self.registry,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one request", LATENCY_BUCKETS
        )
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step", ITERATION_BUCKETS
        )
        self._request_times = {
            name: self._histogram(f"{name}_seconds", doc, REQUEST_BUCKETS)
            for name, doc in (
                ("e2e_request_latency", "Arrival to end"),
                ("request_queue_time", "Arrival to first scheduled"),
                ("request_prefill_time", "First scheduled to first token"),
                ("request_decode_time", "First token to last"),
                ("request_inference_time", "First scheduled to last token"),
            )
        }
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean, by request", LATENCY_BUCKETS
        )
        self._prompt_lengths = self._histogram(
            "request_prompt_tokens", "Prompt tokens, by request", LENGTH_BUCKETS
        )
        self._generation_lengths = self._histogram(
            "request_generation_tokens", "Generated tokens, by request", LENGTH_BUCKETS
        )

    def watch(self, stats: Callable[[], SchedulerStats]) -> None:
        """Read the scheduler's own counts from `stats` at each scrape."""
        self.registry.register(_SchedulerCollector(stats, self.labels))

    def stepped(self, num_scheduled_tokens: int, num_faults: int) -> None:
        """Note a step."""
        self.iteration_tokens.observe(num_scheduled_tokens)
        if num_faults:
            self.corrupted_requests.inc(num_faults)

    def finished(self, answer: Answer, finish_reason: str, now: float) -> None:
        """Note the end of one answer."""
        self.request_success.labels(*self.labels.values(), finish_reason).inc()
        self._prompt_lengths.observe(answer.request.num_prompt_tokens)
        self._generation_lengths.observe(answer.text.num_tokens)
        times = self._request_times
        arrival_time = answer.request.arrival_time
        times["e2e_request_latency"].observe(now - arrival_time)
        if answer.scheduled_time is None:
            return
        times["request_queue_time"].observe(answer.scheduled_time - arrival_time)
        if answer.first_token_time is None or answer.last_token_time is None:
            return
        decode_time = answer.last_token_time - answer.first_token_time
        times["request_prefill_time"].observe(answer.first_token_time - answer.scheduled_time)
        times["request_decode_time"].observe(decode_time)
        times["request_inference_time"].observe(answer.last_token_time - answer.scheduled_time)
        if answer.text.num_tokens > 1:
            self._time_per_output_token.observe(decode_time / (answer.text.num_tokens - 1))

    def render(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return self._prometheus.generate_latest(self.registry)

    def _counter(self, name: str, doc: str, kind: str = "Counter", **options: Any) -> Any:
        make = getattr(self._prometheus, kind)
        made = make(f"vllm:{name}", doc, list(self.labels), registry=self.registry, **options)
        return made.labels(**self.labels)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Any:
        return self._counter(name, doc, "Histogram", buckets=buckets)


class Unwatched:
    """Takes what Metrics takes and keeps nothing: for an engine that nobody scrapes."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: object) -> None:
        return None


class _SchedulerCollector:
    """Yields what the scheduler counts, at scrape time."""

    def __init__(self, stats: Callable[[], SchedulerStats], labels: dict[str, str]) -> None:
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._stats()
        # The engine's thread may be between two of these counts: a gauge is never negative (C67).
        used = max(0, stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks)
        used_share = used / stats.num_blocks
        gauges = (
            ("vllm:num_requests_running", "Requests in the batch", stats.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used_share),
        )
        recomputed = "Tokens computed again after a preemption"
        counters = (
            ("vllm:num_preemptions", "Preemptions", stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found cached", stats.prefix_hits_tokens),
            ("octavo:recomputed_tokens", recomputed, stats.recomputed_tokens),
            ("octavo:steps", "Engine steps", stats.steps),
        )
        for kind, family in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, doc, value in family:
                metric = kind(name, doc, labels=list(self._labels))
                metric.add_metric(list(self._labels.values()), value)
                yield metric
