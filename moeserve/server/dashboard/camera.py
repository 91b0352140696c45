"""Takes pictures of the running server for the page: reads what others keep, and makes rates of counters."""

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.config import Config
from moeserve.engine.outputs import ReplicaStats
from moeserve.ids import DpRank
from moeserve.observability.frontend_metrics import FrontendMetrics, count_of
from moeserve.server.dashboard.picture import (
    HealthPicture,
    LayoutPicture,
    Picture,
    PlacementPicture,
    Point,
    ReplicaPicture,
    TotalsPicture,
)
from moeserve.server.engine_client import EngineClient
from moeserve.server.engine_registry import EngineRegistry
from moeserve.server.placement.records import describe_state
from moeserve.server.placement.service import PlacementService


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Counters at a moment."""

    time_s: float
    generation_tokens: float
    prompt_tokens: float
    requests: float


class Camera:
    """`clock` gives seconds, `unix_time` seconds since 1970."""

    def __init__(
        self,
        config: Config,
        *,
        version: str,
        engine: EngineClient,
        registry: EngineRegistry,
        metrics: FrontendMetrics,
        placement: PlacementService,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
    ) -> None:
        self._config = config
        self._version = version
        self._engine = engine
        self._registry = registry
        self._metrics = metrics
        self._placement = placement
        self._clock = clock
        self._unix_time = unix_time
        self._started_s = clock()
        self._was_ready = False
        self._counts = self._count()

    def __call__(self) -> Picture:
        """The server now; rates are over the time since the last picture."""
        counts, before = self._count(), self._counts
        self._counts = counts
        seconds = max(counts.time_s - before.time_s, 1e-3)
        replicas = self._replicas()
        totals, placement = self._totals(), self._placement_picture()
        point = Point(
            time=self._unix_time(),
            generation_tokens_per_s=(counts.generation_tokens - before.generation_tokens) / seconds,
            prompt_tokens_per_s=(counts.prompt_tokens - before.prompt_tokens) / seconds,
            requests_per_s=(counts.requests - before.requests) / seconds,
            running=totals.running,
            waiting=totals.waiting,
            kv_usage=totals.kv_usage,
            balancedness=placement.balancedness,
            floor=placement.floor,
            epoch=placement.epoch,
        )
        parallel = self._config.parallel
        return Picture(
            model=self._config.model.served_names[0],
            version=self._version,
            uptime_s=counts.time_s - self._started_s,
            health=self._health(),
            layout=LayoutPicture(
                dp_size=parallel.data_parallel_size,
                tp_size=parallel.tensor_parallel_size,
                num_ranks=parallel.data_parallel_size * parallel.tensor_parallel_size,
            ),
            replicas=replicas,
            totals=totals,
            placement=placement,
            point=point,
        )

    def _count(self) -> _Counts:
        metrics = self._metrics
        return _Counts(
            time_s=self._clock(),
            generation_tokens=count_of(metrics.generation_tokens),
            prompt_tokens=count_of(metrics.prompt_tokens),
            requests=metrics.num_finished,
        )

    def _health(self) -> HealthPicture:
        if self._engine.is_draining:
            return HealthPicture(state="draining", reason="no new requests are taken")
        if self._engine.is_ready:
            self._was_ready = True
            return HealthPicture(state="ready")
        if self._was_ready:
            return HealthPicture(state="lost", reason="ranks are gone, or are being started again")
        return HealthPicture(state="starting", reason="the ranks load the model")

    def _replicas(self) -> list[ReplicaPicture]:
        stats, ready = self._registry.read_stats(), self._registry.ready_dp_ranks
        return [
            self._replica(DpRank(dp_rank), stats.get(DpRank(dp_rank)), is_ready=DpRank(dp_rank) in ready)
            for dp_rank in range(self._config.parallel.data_parallel_size)
        ]

    def _replica(self, dp_rank: DpRank, stats: ReplicaStats | None, *, is_ready: bool) -> ReplicaPicture:
        if stats is None:
            return ReplicaPicture(dp_rank=dp_rank, is_ready=is_ready)
        queried = stats.num_prefix_queried_tokens
        return ReplicaPicture(
            dp_rank=dp_rank,
            is_ready=is_ready,
            report_age_s=self._registry.stats_age_s(dp_rank, self._clock()),
            num_steps=stats.step_id,
            running=stats.num_running,
            waiting=stats.num_waiting,
            num_blocks=stats.num_blocks,
            free_blocks=stats.num_free_blocks,
            prefix_hit_rate=stats.num_prefix_hit_tokens / queried if queried else None,
            num_preemptions=stats.num_preemptions,
        )

    def _totals(self) -> TotalsPicture:
        stats = self._registry.read_stats().values()
        num_blocks = sum(replica.num_blocks for replica in stats)
        free = sum(replica.num_free_blocks for replica in stats)
        return TotalsPicture(
            running=sum(replica.num_running for replica in stats),
            waiting=sum(replica.num_waiting for replica in stats),
            unfinished=self._engine.num_unfinished,
            max_unfinished=self._engine.max_unfinished,
            kv_usage=1.0 - free / num_blocks if num_blocks else 0.0,
        )

    def _placement_picture(self) -> PlacementPicture:
        view = self._placement.view
        sample = self._placement.read_sample()
        layers = sample.layers
        worst_layer = min(layers, key=lambda layer: layers[layer].balancedness) if layers else None
        state, reason = describe_state(view, engine_is_ready=self._engine.is_ready)
        return PlacementPicture(
            state=state,
            reason=reason,
            frozen=view.frozen,
            epoch=sample.epoch,
            balancedness=sum(layer.balancedness for layer in layers.values()) / len(layers) if layers else None,
            worst=None if worst_layer is None else layers[worst_layer].balancedness,
            worst_layer=worst_layer,
            floor=None if worst_layer is None else layers[worst_layer].floor,
            rank_load=sample.rank_load,
            progress_age_s=None if view.status is None else view.status.progress_age_s,
            change=view.change,
        )
