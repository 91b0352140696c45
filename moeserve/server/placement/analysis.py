"""A load under the map and split in force: how even the ranks are, how even chance lets them be, who is hot.

Axes: L MoE layers, E logical experts, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve.observability.placement_metrics import LayerSample
from moeserve.server.placement.loads import load_of
from moeserve_placement import Cluster, ExpertPlacement
from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller.evidence import Interval
from moeserve_placement.cost import balancedness, by_rank
from moeserve_placement.load import Phase
from moeserve_placement.noise_floor import noise_floor
from moeserve_placement.split import tokens_in_force

TOP_EXPERTS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadAnalysis:
    phase: Phase
    num_windows: int
    duration_s: float
    num_steps: int
    num_tokens: int
    load_LE: FloatArray
    rank_load_LR: FloatArray
    balancedness_L: FloatArray
    floor: float
    """Expected balancedness of a perfect placement at so many assignments, which is the same in every layer."""
    assignments_per_rank: float

    @property
    def relative_load_R(self) -> FloatArray:
        """Load of each rank over the mean, averaged over the layers."""
        mean_L1 = np.maximum(self.rank_load_LR.mean(axis=1, keepdims=True), 1e-300)
        relative: FloatArray = (self.rank_load_LR / mean_L1).mean(axis=0)
        return relative

    @property
    def top_experts(self) -> list[tuple[int, int, float]]:
        """Row, expert and load over the mean expert's in its layer: the hottest ones that have any load."""
        relative_LE = self.load_LE / np.maximum(self.load_LE.mean(axis=1, keepdims=True), 1e-300)
        order = np.argsort(relative_LE, axis=None, kind="stable")[::-1][:TOP_EXPERTS]
        rows, experts = np.unravel_index(order, relative_LE.shape)
        return [
            (int(row), int(expert), float(relative_LE[row, expert]))
            for row, expert in zip(rows, experts, strict=True)
            if relative_LE[row, expert] > 0
        ]

    def layer_samples(self, layer_ids: Sequence[int]) -> dict[int, LayerSample]:
        """By the model's layer number."""
        return {
            layer_id: LayerSample(balancedness=float(value), floor=self.floor)
            for layer_id, value in zip(layer_ids, self.balancedness_L, strict=True)
        }


def analyse(
    intervals: Sequence[Interval], phase: Phase, placement: ExpertPlacement, split_LP: FloatArray, cluster: Cluster
) -> LoadAnalysis:
    """At least one interval is needed."""
    load_LE, num_tokens = load_of(intervals, phase)
    rank_load_LR = by_rank(tokens_in_force(placement.physical_to_logical_LP, load_LE, split_LP), cluster)
    assignments = float(load_LE.sum(axis=1).mean()) / cluster.num_ranks
    return LoadAnalysis(
        phase=phase,
        num_windows=len(intervals),
        duration_s=sum(interval.duration_s for interval in intervals),
        num_steps=sum(interval.steps.num_steps for interval in intervals),
        num_tokens=num_tokens,
        load_LE=load_LE,
        rank_load_LR=rank_load_LR,
        balancedness_L=balancedness(rank_load_LR, cluster),
        floor=noise_floor(assignments, cluster.num_ranks),
        assignments_per_rank=assignments,
    )
