"""Candidate changes of a map: for pairs of a loaded and a less loaded rank, the best change between them.

A change is a swap of two experts (two records move), or a replica of an expert of the loaded rank put over a redundant
replica of the other rank, or onto an empty place of it (one record moves).

Axes: L layers, E logical experts, P places, R ranks, H pairs of ranks, i and j places of the loaded and of the other
rank; M chosen changes, flattened over the layers.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.pairs import MapState, RankPairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """The best change of each pair that has one; those of a layer stand together, its widest pair first."""

    layer_M: IntArray
    pair_M: IntArray
    """0 for the most and the least loaded rank of the layer."""
    place_from_M: IntArray
    place_to_M: IntArray
    swaps_M: BoolArray
    """False: the place at `place_to` is overwritten with a replica of the expert at `place_from`."""
    num_records_M: IntArray
    moved_M: FloatArray
    """Load that leaves the loaded rank."""
    score_M: FloatArray
    """Gain for each record."""

    def select(self, keep_M: BoolArray) -> "Changes":
        return Changes(
            layer_M=self.layer_M[keep_M],
            pair_M=self.pair_M[keep_M],
            place_from_M=self.place_from_M[keep_M],
            place_to_M=self.place_to_M[keep_M],
            swaps_M=self.swaps_M[keep_M],
            num_records_M=self.num_records_M[keep_M],
            moved_M=self.moved_M[keep_M],
            score_M=self.score_M[keep_M],
        )

    def until_moved(self, wanted_L: FloatArray) -> "Changes":
        """The first changes of each layer: none more once they move as much load as is wanted."""
        total_M = np.cumsum(self.moved_M)
        before_M = total_M - self.moved_M
        first_L = np.searchsorted(self.layer_M, np.arange(wanted_L.size))
        before_layer_L = np.append(before_M, 0.0)[np.minimum(first_L, before_M.size)]
        return self.select(before_M - before_layer_L[self.layer_M] < wanted_L[self.layer_M])

    def apply(self, table_LP: IntArray) -> IntArray:
        """The tables after the changes, the given ones unchanged."""
        changed_LP = table_LP.copy()
        changed_LP[self.layer_M, self.place_to_M] = table_LP[self.layer_M, self.place_from_M]
        swap = self.swaps_M
        layer_M = self.layer_M[swap]
        changed_LP[layer_M, self.place_from_M[swap]] = table_LP[layer_M, self.place_to_M[swap]]
        return changed_LP

    def num_records_L(self, num_layers: int) -> IntArray:
        """Records that move in each layer."""
        return np.bincount(self.layer_M, self.num_records_M, num_layers).astype(np.int64)


def best_changes(state: MapState, cluster: Cluster, *, num_pairs: int, flows: bool, spread: bool) -> Changes:
    """One change for each pair whose loaded rank is above its target and for which any helps.

    flows: replicas may share unevenly. spread: replicas of one expert go to different nodes.
    """
    pairs = RankPairs(state, cluster, num_pairs, spread=spread)
    swaps, copies = pairs.swaps(), pairs.copies(flows=flows)
    num_records_LHij = pairs.num_swap_records()
    score_LHij = np.maximum(swaps.gain_LHij / num_records_LHij, copies.gain_LHij)
    num_layers, num_pairs, num_i, num_j = score_LHij.shape
    flat_LHX = score_LHij.reshape(num_layers, num_pairs, num_i * num_j)
    best_LH = flat_LHX.argmax(axis=2)
    score_LH = np.take_along_axis(flat_LHX, best_LH[..., None], axis=2)[..., 0]
    layer, pair = np.nonzero((score_LH > 0.0) & (pairs.level_from_LH > state.target_L[:, None]))
    i, j = np.divmod(best_LH[layer, pair], num_j)
    found = layer, pair, i, j
    num_records = num_records_LHij[found]
    is_swap = swaps.gain_LHij[found] / num_records >= copies.gain_LHij[found]
    changes = Changes(
        layer_M=layer,
        pair_M=pair,
        place_from_M=pairs.place_from_LHi[layer, pair, i],
        place_to_M=pairs.place_to_LHj[layer, pair, j],
        swaps_M=is_swap,
        num_records_M=np.where(is_swap, num_records, 1),
        moved_M=np.where(is_swap, swaps.moved_LHij[found], copies.moved_LHij[found]),
        score_M=score_LH[layer, pair],
    )
    return _one_loss_each(changes, state.table_LP, state.num_replicas_LE.shape[1])


def _one_loss_each(changes: Changes, table_LP: IntArray, num_experts: int) -> Changes:
    """An expert may lose one replica in a sweep: two changes that both think another stays could lose the last."""
    lost_M = np.where(changes.swaps_M, -1, table_LP[changes.layer_M, changes.place_to_M])
    key_M = np.where(lost_M < 0, -1 - np.arange(lost_M.size), changes.layer_M * num_experts + lost_M)
    _, first = np.unique(key_M, return_index=True)
    keep_M = np.zeros(lost_M.size, dtype=bool)
    keep_M[first] = True
    return changes.select(keep_M)
