"""Pairs of a loaded and a less loaded rank: what may change hands between them, and what that would gain.

The gain of moving t from one rank to another is the drop of sum_r cost_r^2 / capacity_r, the objective of the split.
Where replicas share unevenly, ranks that are level with one another usually are so because load flows between them:
what one of n level ranks gives away, all n lose. `reach` says how many ranks a change may count on, and makes large
changes, which settle many ranks with one move, look as good as they are if the flow is there. Whether it is shows when
the split is solved.

Axes: L layers, E logical experts, P places, R ranks, N nodes, H pairs of ranks, i and j places of the loaded and of the
other rank.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray, flat_experts, sum_flat, with_column
from moeserve_placement.cluster import Cluster
from moeserve_placement.constraints import fair_share, replicas_on_nodes

LEVEL = 1e-3
"""Ranks whose levels differ by less than this share of them are level."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MapState:
    """Maps under work, what their places and ranks cost now, and how to look for changes."""

    table_LP: IntArray
    fixed_LP: BoolArray
    """Places that must keep what they hold."""
    num_replicas_LE: IntArray
    cost_LP: FloatArray
    level_LR: FloatArray
    """Cost over capacity of each rank."""
    target_L: FloatArray
    turn_L: IntArray
    """The most loaded rank is paired with the turn-th least loaded one, and so on around."""
    reach_L: IntArray
    """The most level ranks that a change may count on to share what it moves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """One change for each pair and places i and j."""

    gain_LHij: FloatArray
    """-inf where the change may not be."""
    moved_LHij: FloatArray


class RankPairs:
    """The places of every pair side by side, and which of them may change hands."""

    def __init__(self, state: MapState, cluster: Cluster, num_pairs: int, *, spread: bool) -> None:
        order_LR = np.argsort(state.level_LR, axis=1, kind="stable")
        turned_LH = (np.arange(num_pairs) + state.turn_L[:, None]) % max(cluster.num_ranks // 2, 1)
        rank_from_LH, rank_to_LH = order_LR[:, ::-1][:, :num_pairs], np.take_along_axis(order_LR, turned_LH, axis=1)
        self._place_ranks(state, cluster, order_LR, rank_from_LH, rank_to_LH)
        # One more column stands for the places that a smaller rank lacks: fixed, and of no expert.
        expert_LP, fixed_LP = with_column(state.table_LP, -1), with_column(state.fixed_LP, True)
        cost_LP, count_LE = with_column(state.cost_LP, 0.0), with_column(state.num_replicas_LE, 0)
        layer = np.arange(len(state.table_LP))[:, None, None]
        self.place_from_LHi, self.place_to_LHj = cluster.place_Rs[rank_from_LH], cluster.place_Rs[rank_to_LH]
        self._expert_from_LHi = expert_LP[layer, self.place_from_LHi]
        self._expert_to_LHj = expert_LP[layer, self.place_to_LHj]
        self._cost_from_LHi, self._cost_to_LHj = cost_LP[layer, self.place_from_LHi], cost_LP[layer, self.place_to_LHj]
        self._count_from_LHi = count_LE[layer, self._expert_from_LHi]
        self._count_to_LHj = count_LE[layer, self._expert_to_LHj]
        is_empty_LHj = self._expert_to_LHj < 0
        same_LHij = self._expert_from_LHi[..., None] == self._expert_to_LHj[..., None, :]
        may_change_LHj = ~fixed_LP[layer, self.place_to_LHj]
        self._copied_LHi = (self._expert_from_LHi >= 0) & ~same_LHij.any(axis=3)
        self._goes_LHi = self._copied_LHi & ~fixed_LP[layer, self.place_from_LHi]
        self._comes_LHj = may_change_LHj & (is_empty_LHj | ~same_LHij.any(axis=2))
        self._dropped_LHj = may_change_LHj & (self._count_to_LHj != 1)
        self._elsewhere_LHj = self._level_elsewhere(state, cluster)
        if spread and cluster.num_nodes > 1:
            self._keep_apart(state, cluster, rank_from_LH, rank_to_LH)

    def _place_ranks(
        self, state: MapState, cluster: Cluster, order_LR: IntArray, rank_from_LH: IntArray, rank_to_LH: IntArray
    ) -> None:
        self.level_from_LH = np.take_along_axis(state.level_LR, rank_from_LH, axis=1)
        self._level_to_LH = np.take_along_axis(state.level_LR, rank_to_LH, axis=1)
        reach_LR = _num_level(state.level_LR, order_LR, state.reach_L)
        slowness_R = 1.0 / cluster.capacity_R
        self._slowness_to_LH = slowness_R[rank_to_LH]
        # How much closer the two ranks come for each token moved: n level ranks share it.
        self._closing_LH = slowness_R[rank_from_LH] / np.take_along_axis(reach_LR, rank_from_LH, axis=1)
        self._closing_LH += self._slowness_to_LH / np.take_along_axis(reach_LR, rank_to_LH, axis=1)

    def num_swap_records(self) -> IntArray:
        """Records that move in a swap, for each pair, i and j: an empty place has none to give back."""
        records_LHij = np.where(self._expert_to_LHj < 0, 1, 2)[..., None, :]
        return np.broadcast_to(records_LHij, (*self.place_from_LHi.shape, self.place_to_LHj.shape[2]))

    def swaps(self) -> Options:
        """Expert i and what j holds change places."""
        moved = self._cost_from_LHi[..., None] - self._cost_to_LHj[..., None, :]
        gap = (self.level_from_LH - self._level_to_LH)[..., None, None]
        gain = moved * (2.0 * gap - self._closing_LH[..., None, None] * moved)
        gain[~(self._goes_LHi[..., None] & self._comes_LHj[..., None, :])] = -np.inf
        return Options(gain_LHij=gain, moved_LHij=moved)

    def copies(self, *, flows: bool) -> Options:
        """A replica of i takes the place of replica j."""
        # What replica j took flows to its other replicas; then i's load flows until both ranks are level.
        dropped = self._cost_to_LHj
        others = np.maximum(self._count_to_LHj - 1, 1)
        lost = dropped * (2.0 * self._elsewhere_LHj + dropped / others)
        level_to_LHj = self._level_to_LH[..., None] - dropped * self._slowness_to_LH[..., None]
        won = dropped * (self._level_to_LH[..., None] + level_to_LHj)
        gap_LHj = self.level_from_LH[..., None] - level_to_LHj
        most_LHi = self._cost_from_LHi if flows else self._cost_from_LHi / (self._count_from_LHi + 1.0)
        moved = np.minimum(most_LHi[..., None], np.maximum(gap_LHj / self._closing_LH[..., None], 0.0)[..., None, :])
        gain = moved * (2.0 * gap_LHj[..., None, :] - self._closing_LH[..., None, None] * moved)
        gain += (won - lost)[..., None, :]
        gain[~(self._copied_LHi[..., None] & self._dropped_LHj[..., None, :])] = -np.inf
        return Options(gain_LHij=gain, moved_LHij=moved)

    def _level_elsewhere(self, state: MapState, cluster: Cluster) -> FloatArray:
        """Mean level of the ranks that hold another replica of the expert at j."""
        num_layers, num_experts = state.num_replicas_LE.shape
        flat = flat_experts(state.table_LP, num_experts)
        level_LP = state.level_LR[:, cluster.rank_of_place_P]
        sums = sum_flat(flat, level_LP, num_layers * (num_experts + 1)).reshape(num_layers, -1)
        sum_LHj = sums[np.arange(num_layers)[:, None, None], self._expert_to_LHj]
        elsewhere: FloatArray = (sum_LHj - self._level_to_LH[..., None]) / np.maximum(self._count_to_LHj - 1, 1)
        return elsewhere

    def _keep_apart(self, state: MapState, cluster: Cluster, rank_from_LH: IntArray, rank_to_LH: IntArray) -> None:
        """Rule out changes that leave a node with more than its fair number of an expert's replicas."""
        num_nodes = cluster.num_nodes
        on_node_LEN = replicas_on_nodes(state.table_LP, state.num_replicas_LE.shape[1], cluster)
        node_from_LH1, node_to_LH1 = cluster.node_R[rank_from_LH][..., None], cluster.node_R[rank_to_LH][..., None]
        layer = np.arange(len(state.table_LP))[:, None, None]
        same_LH1, is_empty_LHj = node_from_LH1 == node_to_LH1, self._expert_to_LHj < 0
        there_LHi = on_node_LEN[layer, self._expert_from_LHi, node_to_LH1]
        here_LHj = on_node_LEN[layer, self._expert_to_LHj, node_from_LH1]
        self._goes_LHi &= same_LH1 | (there_LHi < fair_share(self._count_from_LHi, num_nodes))
        self._copied_LHi = self._copied_LHi & (there_LHi < fair_share(self._count_from_LHi + 1, num_nodes))
        self._comes_LHj &= same_LH1 | is_empty_LHj | (here_LHj < fair_share(self._count_to_LHj, num_nodes))
        # An expert that loses a replica may have too many left on another node.
        left_LHjN = on_node_LEN[layer, self._expert_to_LHj] - (np.arange(num_nodes) == node_to_LH1[..., None])
        fair_LHj = fair_share(self._count_to_LHj - 1, num_nodes)
        self._dropped_LHj = self._dropped_LHj & (is_empty_LHj | (left_LHjN.max(axis=3) <= fair_LHj))


def _num_level(level_LR: FloatArray, order_LR: IntArray, most_L: IntArray) -> IntArray:
    """How many ranks are level with each [L, R], at most `most_L`; the order sorts the levels."""
    sorted_LR = np.take_along_axis(level_LR, order_LR, axis=1)
    starts_LR = np.ones(sorted_LR.shape, dtype=bool)
    starts_LR[:, 1:] = np.diff(sorted_LR, axis=1) > LEVEL * sorted_LR[:, 1:]
    run = np.cumsum(starts_LR) - 1
    size_LR = np.bincount(run)[run].reshape(sorted_LR.shape)
    num_level_LR: IntArray = np.empty_like(size_LR)
    np.put_along_axis(num_level_LR, order_LR, np.minimum(size_LR, most_L[:, None]), axis=1)
    return num_level_LR
