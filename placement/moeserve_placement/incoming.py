"""Few changes a rank: plans cut down to what fits into the spare places that a migration copies into.

A change is a place that holds another expert than under the map in force, or none. Those of any rank in any layer are
limited, not only the experts that come in, so that the way back of a migration keeps to the limit too.

Axes: L layers, R ranks, P places.
"""

import numpy as np

from moeserve_placement.arrays import BoolArray, IntArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.cost import by_rank
from moeserve_placement.moves import keep_in_place
from moeserve_placement.placement import PlacementError


def fits(current_LP: IntArray, new_LP: IntArray, cluster: Cluster, max_incoming: int | None) -> BoolArray:
    """Layers [L] in which no rank has more changes than may be."""
    if max_incoming is None:
        return np.ones(len(new_LP), dtype=bool)
    fitting: BoolArray = _num_changes_LR(current_LP, new_LP, cluster).max(axis=1) <= max_incoming
    return fitting


def closed_places(current_LP: IntArray, new_LP: IntArray, cluster: Cluster, max_incoming: int) -> BoolArray:
    """Places [L, P] that must not change any more: the unchanged ones of ranks with as many changes as may be."""
    is_full_LR = _num_changes_LR(current_LP, new_LP, cluster) >= max_incoming
    closed: BoolArray = is_full_LR[:, cluster.rank_of_place_P] & (new_LP == current_LP)
    return closed


def staged(
    current_LP: IntArray, new_LP: IntArray, first_LP: BoolArray, cluster: Cluster, max_incoming: int
) -> IntArray:
    """As much of the new map as fits, and a map again; the rest is for the plan after it.

    first_LP: changes that are taken back last. Raises PlacementError where nothing of a layer's changes fits: experts
    that can only change places all at once.
    """
    staged_LP, _ = keep_in_place(new_LP, np.zeros(new_LP.shape), current_LP, cluster)
    over_LR = _num_changes_LR(current_LP, staged_LP, cluster) > max_incoming
    for layer, rank in np.argwhere(over_LR):
        row_P, old_P, places = staged_LP[layer], current_LP[layer], cluster.places(int(rank))
        for place in places[np.argsort(first_LP[layer, places], kind="stable")]:
            if (row_P[places] != old_P[places]).sum() <= max_incoming:
                break
            _take_back(row_P, old_P, int(place))
    for layer in np.flatnonzero(over_LR.any(axis=1)):
        if (staged_LP[layer] == current_LP[layer]).all():
            raise PlacementError(
                f"layer {layer}: max_incoming_per_layer_rank must be above {max_incoming} for what the constraints need"
            )
    return staged_LP


def _take_back(row_P: IntArray, old_P: IntArray, place: int) -> None:
    """Let a place of `row_P` hold what it did; an expert that this leaves nowhere gets an old place back too."""
    waiting = [place] if row_P[place] != old_P[place] else []
    while waiting:
        place = waiting.pop()
        lost, row_P[place] = int(row_P[place]), old_P[place]
        if lost >= 0 and not (row_P == lost).any():
            waiting.append(int(np.flatnonzero(old_P == lost)[0]))


def _num_changes_LR(current_LP: IntArray, new_LP: IntArray, cluster: Cluster) -> IntArray:
    return by_rank((new_LP != current_LP).astype(np.float64), cluster).astype(np.int64)
