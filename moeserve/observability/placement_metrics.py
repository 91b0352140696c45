"""Prometheus metrics of expert placement. Counters are fed as changes go on; gauges are read when somebody scrapes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_PREFIX = "moeserve:placement_"
_STAGE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_STATES = ("starting", "static", "stopped", "observing", "preparing", "committing", "settling")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    balancedness: float
    floor: float
    """Balancedness that chance alone would leave a perfect placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSample:
    """Placement as it is now. Loads are relative: 1 is the mean rank's, or the mean expert's of the layer."""

    state: str
    epoch: int | None
    frozen: bool
    plan_age_s: float | None
    failures: Mapping[str, int]
    layers: Mapping[int, LayerSample]
    rank_load: Sequence[float]
    expert_load: Sequence[tuple[int, int, float]]
    """Layer, expert and load of the hottest."""


class PlacementMetrics:
    """`read_sample` is called by every scrape."""

    def __init__(self, registry: CollectorRegistry, read_sample: Callable[[], PlacementSample]) -> None:
        self._registry = registry
        self._changes = self._counter("changes", "Changes that all ranks committed.", ("kind",))
        self._moves = self._counter("moves", "Expert records in committed migrations.")
        self._copied_bytes = self._counter("copied_bytes", "Bytes of expert records that ranks received.")
        self._change_s = Histogram(
            _PREFIX + "change_seconds",
            "From the order of a stage to the answer of the last rank.",
            ("kind", "stage"),
            buckets=_STAGE_BUCKETS_S,
            registry=registry,
        )
        registry.register(_SampleCollector(read_sample))

    def stage_done(self, kind: str, stage: str, seconds: float) -> None:
        """All ranks have staged or committed a change."""
        self._change_s.labels(kind, stage).observe(seconds)

    def landed(self, kind: str, num_moves: int) -> None:
        """A change is in force."""
        self._changes.labels(kind).inc()
        self._moves.inc(num_moves)

    def copied(self, num_bytes: int) -> None:
        """A rank received records, whatever becomes of them."""
        self._copied_bytes.inc(num_bytes)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)


class _SampleCollector(Collector):
    def __init__(self, read_sample: Callable[[], PlacementSample]) -> None:
        self._read_sample = read_sample

    def collect(self) -> Iterator[Metric]:
        sample = self._read_sample()
        state = GaugeMetricFamily(_PREFIX + "state", "1 for the state placement is in.", labels=["state"])
        for name in _STATES:
            state.add_metric([name], float(name == sample.state))
        yield state
        yield GaugeMetricFamily(_PREFIX + "frozen", "1 while nothing moves by itself.", value=float(sample.frozen))
        if sample.epoch is not None:
            yield GaugeMetricFamily(_PREFIX + "epoch", "Placement in force.", value=sample.epoch)
        if sample.plan_age_s is not None:
            yield GaugeMetricFamily(
                _PREFIX + "plan_age_seconds", "Since the migration under way or settling began.",
                value=sample.plan_age_s,
            )  # fmt: skip
        failures = CounterMetricFamily(_PREFIX + "failures", "Changes that failed, by reason.", labels=["reason"])
        for reason, count in sample.failures.items():
            failures.add_metric([reason], count)
        yield failures
        yield from self._loads(sample)

    def _loads(self, sample: PlacementSample) -> Iterator[Metric]:
        even = GaugeMetricFamily(
            _PREFIX + "balancedness", "Mean over max of the rank loads of the newest windows.", labels=["layer"]
        )
        floor = GaugeMetricFamily(
            _PREFIX + "noise_floor", "Balancedness that chance would leave a perfect placement.", labels=["layer"]
        )
        for layer, values in sample.layers.items():
            even.add_metric([str(layer)], values.balancedness)
            floor.add_metric([str(layer)], values.floor)
        ranks = GaugeMetricFamily(
            _PREFIX + "rank_load", "Load of a rank over the mean, averaged over the layers.", labels=["rank"]
        )
        for rank, load in enumerate(sample.rank_load):
            ranks.add_metric([str(rank)], load)
        experts = GaugeMetricFamily(
            _PREFIX + "expert_load", "Load over the mean of its layer, of the hottest experts.",
            labels=["layer", "expert"],
        )  # fmt: skip
        for layer, expert, load in sample.expert_load:
            experts.add_metric([str(layer), str(expert)], load)
        yield from (even, floor, ranks, experts)
