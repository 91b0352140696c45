"""Prometheus metrics of the frontend, in a registry of their own.

Counters and histograms are fed as things happen; gauges of the replicas are read from their last statistics when
somebody scrapes, so that a step costs nothing here.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moeserve.engine.outputs import FinishReason, ReplicaStats
from moeserve.ids import DpRank

_PREFIX = "moeserve:"
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)

ReadStats = Callable[[], Mapping[DpRank, ReplicaStats]]


class FrontendMetrics:
    """What the frontend counts. `read_stats` gives the newest statistics of each replica."""

    def __init__(self, read_stats: ReadStats) -> None:
        self.registry = CollectorRegistry()
        """For those who count things of their own beside these."""
        self.registry.register(_ReplicaCollector(read_stats))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that gave a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.resumed_requests = self._counter("resumed_requests", "Requests sent again to ranks that were restarted.")
        finished = self._counter("request_success", "Requests that ended, by reason.", ("finished_reason",))
        self._finished = {reason: finished.labels(reason.value) for reason in FinishReason}
        self._answers = self._counter("http_requests", "HTTP answers by route and status.", ("route", "status"))
        self.ttft_s = self._histogram("time_to_first_token_seconds", "Submission to first token.", _TTFT_BUCKETS_S)
        self.itl_s = self._histogram("inter_token_latency_seconds", "Gap between two tokens.", _ITL_BUCKETS_S)
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "Submission to last token.", _E2E_BUCKETS_S)

    def count_finished(self, reason: FinishReason) -> None:
        self._finished[reason].inc()

    @property
    def num_finished(self) -> float:
        """Requests that ended, whatever the reason."""
        return sum(count_of(counter) for counter in self._finished.values())

    def count_answer(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """Text exposition of everything."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)


def count_of(counter: Counter) -> float:
    """The value of a counter, or of all its children."""
    return sum(sample.value for family in counter.collect() for sample in family.samples if _is_total(sample.name))


def _is_total(name: str) -> bool:
    """Not the time at which the counter was made."""
    return name.endswith("_total")


class _ReplicaCollector(Collector):
    """Gauges and counters of each DP replica, from its last step."""

    def __init__(self, read_stats: ReadStats) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        yield self._gauge(stats, "num_requests_running", "Requests in the running batch.", lambda s: s.num_running)
        yield self._gauge(stats, "num_requests_waiting", "Requests waiting to run.", lambda s: s.num_waiting)
        yield self._gauge(stats, "num_kv_blocks", "KV-cache blocks.", lambda s: s.num_blocks)
        yield self._gauge(stats, "num_free_kv_blocks", "Blocks that no request holds.", lambda s: s.num_free_blocks)
        yield self._gauge(stats, "kv_cache_usage_perc", "Share of the blocks that requests hold, 0 to 1.", _kv_usage)
        yield self._counter(stats, "num_preemptions", "Requests preempted.", lambda s: s.num_preemptions)
        yield self._counter(
            stats, "prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.num_prefix_queried_tokens
        )
        yield self._counter(stats, "prefix_cache_hits", "Prompt tokens found.", lambda s: s.num_prefix_hit_tokens)

    def _gauge(
        self, stats: Mapping[DpRank, ReplicaStats], name: str, text: str, read: Callable[[ReplicaStats], float]
    ) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["dp_rank"])
        for dp_rank, replica in stats.items():
            family.add_metric([str(dp_rank)], read(replica))
        return family

    def _counter(
        self, stats: Mapping[DpRank, ReplicaStats], name: str, text: str, read: Callable[[ReplicaStats], float]
    ) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["dp_rank"])
        for dp_rank, replica in stats.items():
            family.add_metric([str(dp_rank)], read(replica))
        return family


def _kv_usage(stats: ReplicaStats) -> float:
    return 1.0 - stats.num_free_blocks / max(stats.num_blocks, 1)
