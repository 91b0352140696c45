"""What following the load would bring, from a recorded trace: worth it or not, how much memory, how many moves.

The trace is replayed twice, with the placement frozen and with the controller; the difference is what was missed.

Axes: W windows served, L MoE layers.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from moeserve_placement.controller.evidence import merge_intervals
from moeserve_placement.load import LoadTrace
from moeserve_placement.planner import fresh_placement
from moeserve_placement.scenario import Scenario
from moeserve_placement.simulator import Simulation, intervals_of, simulate

ENOUGH = 0.005
"""More redundant experts are not worth their memory if the most of them save less than this share of step time more."""
MOST_EXTRA = 4
"""Redundant places a rank that the curve goes up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdvice:
    """One MoE layer."""

    layer: int
    """Layer of the model."""
    balancedness_frozen: float
    balancedness_followed: float
    saved_share: float
    """Share of all step time that following the load saves in this layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyPoint:
    """The load followed with so many redundant experts."""

    places_per_rank: int
    num_redundant_experts: int
    """A layer."""
    bytes_per_rank: int
    """Memory of the redundant experts of all layers."""
    balancedness: float
    lost_share: float
    """Share of step time lost to imbalance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Plain values: `to_dict` gives JSON types only, `table` Markdown."""

    model: str
    num_ranks: int
    num_redundant_experts: int
    hours: float
    saved_share: float
    """Share of step time that following the load saves, less what its migrations cost."""
    lost_share_frozen: float
    """Share of step time lost to imbalance: by waiting for the most loaded rank of each layer."""
    lost_share_followed: float
    first_moves: int
    """Records of the first migration, from the placement the trace begins with."""
    moves_per_hour: float
    """After it."""
    bytes_per_hour: float
    layers: tuple[LayerAdvice, ...]
    curve: tuple[RedundancyPoint, ...]
    enough_redundant_experts: int
    """The fewest on the curve that lose no more than 0.5 % of step time against the best."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        lines = [
            f"{self.model}: {self.num_ranks} ranks, {self.num_redundant_experts} redundant experts a layer, "
            f"{self.hours:.2f} hours",
            f"Following the load saves {self.saved_share:.2%} of step time: {self.lost_share_frozen:.2%} is lost to "
            f"imbalance while frozen, {self.lost_share_followed:.2%} when followed.",
            f"The first migration moves {self.first_moves} experts, then {self.moves_per_hour:.1f} an hour "
            f"({self.bytes_per_hour / 1e9:.2f} GB).",
            "",
            "| layer | balancedness frozen | followed | step time saved |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| {layer.layer} | {layer.balancedness_frozen:.4f} | {layer.balancedness_followed:.4f} "
            f"| {layer.saved_share:.3%} |"
            for layer in self.layers
        ]
        lines += [
            "",
            "| places a rank | redundant experts | MB a rank | balancedness | step time lost | |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {point.places_per_rank} | {point.num_redundant_experts} | {point.bytes_per_rank / 1e6:.1f} "
            f"| {point.balancedness:.4f} | {point.lost_share:.2%} "
            f"| {'enough' if point.num_redundant_experts == self.enough_redundant_experts else ''} |"
            for point in self.curve
        ]
        return "\n".join(lines)


def advise(trace: LoadTrace, scenario: Scenario) -> Advice:
    """Advice for the scenario's placement and ranks; its policy does not matter.

    The experts' share of step time is that of the controller's settings. All shares are of the step time with the
    placement frozen. Raises LoadError where the trace has under two windows, PlacementError where shapes do not fit.
    """
    frozen = simulate(trace, scenario.with_policy("frozen"))
    followed = simulate(trace, scenario.with_policy("incremental"))
    share = scenario.controller.expert_share / max(float(frozen.highest_WL.sum()), 1e-300)
    saved_L = share * (frozen.highest_WL - followed.highest_WL).sum(axis=0)
    start_s, end_s = trace.windows[0].start_s, float(followed.time_W[-1])
    ordered_W = np.flatnonzero(followed.moves_W)
    first_moves, since_s = 0, start_s
    if ordered_W.size:
        first_moves, since_s = int(followed.moves_W[ordered_W[0]]), float(followed.time_W[ordered_W[0]])
    later_moves = float(followed.moves_W.sum()) - first_moves
    moves_per_hour = later_moves / max(end_s - since_s, 1e-9) * 3600.0
    curve = _curve(trace, scenario, frozen)
    least = min(point.lost_share for point in curve)
    return Advice(
        model=trace.model,
        num_ranks=scenario.cluster.num_ranks,
        num_redundant_experts=scenario.start.num_redundant_experts,
        hours=(end_s - start_s) / 3600.0,
        saved_share=float(saved_L.sum()) - followed.lost_s / max(end_s - start_s, 1e-9),
        lost_share_frozen=share * _waited(frozen, 0),
        lost_share_followed=share * _waited(followed, 0),
        first_moves=first_moves,
        moves_per_hour=moves_per_hour,
        bytes_per_hour=moves_per_hour * scenario.plan_settings.expert_bytes,
        layers=tuple(
            LayerAdvice(
                layer=layer_id,
                balancedness_frozen=float(frozen.balancedness_WL[:, row].mean()),
                balancedness_followed=float(followed.balancedness_WL[:, row].mean()),
                saved_share=float(saved_L[row]),
            )
            for row, layer_id in enumerate(trace.moe_layer_ids)
        ),
        curve=curve,
        enough_redundant_experts=next(
            point.num_redundant_experts for point in curve if point.lost_share <= least + ENOUGH
        ),
    )


def _curve(trace: LoadTrace, scenario: Scenario, frozen: Simulation) -> tuple[RedundancyPoint, ...]:
    """Each number of places is packed for the first windows, then follows the load; only what comes after counts."""
    intervals = list(intervals_of(trace))
    num_first = min(2 * scenario.controller.num_windows, len(intervals) // 2)
    first_LE = merge_intervals(intervals[:num_first]).load_LE
    num_layers, num_experts = first_LE.shape
    cluster = scenario.cluster
    least = -(-num_experts // cluster.num_ranks)
    share = scenario.controller.expert_share / max(float(frozen.highest_WL[num_first:].sum()), 1e-300)
    points = []
    for per_rank in range(least, min(least + MOST_EXTRA, num_experts) + 1):
        larger = replace(cluster, num_physical_by_rank=(per_rank,) * cluster.num_ranks)
        settings = replace(scenario.plan_settings, policy="incremental", num_physical_by_layer=None)
        start, _ = fresh_placement(first_LE, larger, settings)
        replayed = simulate(trace, replace(scenario, start=start, cluster=larger, plan_settings=settings))
        num_redundant = start.num_redundant_experts
        points.append(
            RedundancyPoint(
                places_per_rank=per_rank,
                num_redundant_experts=num_redundant,
                bytes_per_rank=num_redundant * num_layers * settings.expert_bytes // cluster.num_ranks,
                balancedness=float(replayed.balancedness_WL[num_first:].mean()),
                lost_share=share * _waited(replayed, num_first),
            )
        )
    return tuple(points)


def _waited(simulation: Simulation, first: int) -> float:
    """Time of the experts, in tokens, that went by waiting for the most loaded rank, from one window on."""
    return float((simulation.highest_WL - simulation.mean_WL)[first:].sum())
