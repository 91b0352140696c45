"""One planning problem on one set of ranks: loads, room, pins and what a map is judged by.

Axes: L layers, E logical experts, P places, R ranks; M pins.
"""

from dataclasses import dataclass, replace

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray, with_column
from moeserve_placement.bound import lowest_level
from moeserve_placement.cluster import Cluster
from moeserve_placement.cost import by_rank, mean_level
from moeserve_placement.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    load_LE: FloatArray
    present_LE: BoolArray
    """False: the expert is not of this problem (its group lies on another node) and has no replica in it."""
    room_LR: IntArray
    """Places of each rank that the layer may use."""
    pin_layer_M: IntArray
    pin_expert_M: IntArray
    pin_rank_M: IntArray
    objective: Objective
    max_incoming: int | None
    """The most places of a rank that may change in a layer."""

    @property
    def cluster(self) -> Cluster:
        return self.objective.cluster

    @property
    def num_layers(self) -> int:
        return int(self.load_LE.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.load_LE.shape[1])

    @property
    def pins(self) -> tuple[IntArray, IntArray, IntArray]:
        return self.pin_layer_M, self.pin_expert_M, self.pin_rank_M

    def of_layers(self, rows: IntArray) -> "Problem":
        """The same for some layers, in the order given."""
        renumbered = np.full(self.num_layers, -1)
        renumbered[rows] = np.arange(rows.size)
        kept_M = renumbered[self.pin_layer_M] >= 0
        return replace(
            self,
            load_LE=self.load_LE[rows],
            present_LE=self.present_LE[rows],
            room_LR=self.room_LR[rows],
            pin_layer_M=renumbered[self.pin_layer_M[kept_M]],
            pin_expert_M=self.pin_expert_M[kept_M],
            pin_rank_M=self.pin_rank_M[kept_M],
        )

    def target_L(self, tokens_LP: FloatArray, goal: float) -> FloatArray:
        """Level [L] the highest rank should not exceed: the best that any map could reach, over `goal`."""
        cost_L = self.objective.cost.of_places(tokens_LP).sum(axis=1)
        bound_L = lowest_level(self.load_LE, self.cluster, self.room_LR.sum(axis=1))
        target: FloatArray = np.maximum(mean_level(cost_L, self.cluster), bound_L) / goal
        return target

    def used_LR(self, table_LP: IntArray) -> IntArray:
        """Places of each rank that hold an expert."""
        return by_rank((table_LP >= 0).astype(np.float64), self.cluster).astype(np.int64)

    def fixed_LP(self, table_LP: IntArray) -> BoolArray:
        """Places that must keep what they hold: pinned replicas, and empty places beyond a rank's room."""
        fixed_LP = self._closed_LP(table_LP)
        padded_LP = with_column(table_LP, -1)
        place_Ms = self.cluster.place_Rs[self.pin_rank_M]
        pin, index = np.nonzero(padded_LP[self.pin_layer_M[:, None], place_Ms] == self.pin_expert_M[:, None])
        fixed_LP[self.pin_layer_M[pin], place_Ms[pin, index]] = True
        return fixed_LP

    def _closed_LP(self, table_LP: IntArray) -> BoolArray:
        """Empty places beyond a rank's room, which stay empty."""
        empty_LP = table_LP < 0
        if not empty_LP.any():
            return empty_LP
        spare_LR = self.room_LR - self.used_LR(table_LP)
        before_LP = np.cumsum(empty_LP, axis=1)
        first_P = self.cluster.place_Rs[:, 0][self.cluster.rank_of_place_P]
        nth_LP = before_LP - before_LP[:, first_P] + empty_LP[:, first_P]
        closed: BoolArray = empty_LP & (nth_LP > spare_LR[:, self.cluster.rank_of_place_P])
        return closed
