"""How balanced any placement could be: what no planner can beat, whatever it moves.

A layer's highest rank is at least the mean, and an expert's tokens fit on ranks no higher than a level only if it has
enough replicas: n replicas, on the n fastest ranks at best, carry level x (their capacity). The bound is the lowest
level at which the replicas that all experts need fit into the places. `split_lp` gives the exact optimum for one map.

Axes: L layers, E logical experts, R ranks.
"""

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray, divide
from moeserve_placement.cluster import Cluster
from moeserve_placement.cost import mean_level

BISECTIONS = 30


def lowest_level(load_LE: FloatArray, cluster: Cluster, num_physical_L: IntArray | None = None) -> FloatArray:
    """Lower bound [L] of the highest load / capacity of a rank under any map and split.

    num_physical_L: physical experts of each layer; None: every place of the cluster.
    """
    places = np.full(len(load_LE), cluster.num_physical_experts) if num_physical_L is None else num_physical_L
    reach_R = np.cumsum(np.sort(cluster.capacity_R)[::-1])
    low_L = mean_level(load_LE.sum(axis=1), cluster)
    level_L = low_L.copy()
    rows = np.flatnonzero(_replicas_needed(load_LE, low_L, reach_R) > places)
    low, high = low_L[rows], load_LE[rows].max(axis=1) / reach_R[0]
    for _ in range(BISECTIONS if rows.size else 0):
        middle = (low + high) / 2.0
        fits = _replicas_needed(load_LE[rows], middle, reach_R) <= places[rows]
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    level_L[rows] = low
    return level_L


def balancedness_bound(load_LE: FloatArray, cluster: Cluster, num_physical_L: IntArray | None = None) -> FloatArray:
    """Upper bound [L] of the balancedness of any map and split; 1 where a layer has no load."""
    mean_L = mean_level(load_LE.sum(axis=1), cluster)
    level_L = lowest_level(load_LE, cluster, num_physical_L)
    return divide(mean_L, level_L, 1.0)


def _replicas_needed(load_LE: FloatArray, level_L: FloatArray, reach_R: FloatArray) -> IntArray:
    """Replicas of all experts of each layer; more than any cluster holds where even one on every rank is too few."""
    # The last digit of a load that fits exactly must not cost a replica.
    spread_LE = load_LE / np.maximum(level_L, 1e-300)[:, None] * (1.0 - 1e-12)
    needed_LE = np.ones(spread_LE.shape, dtype=np.int64)
    hot_LE = spread_LE > reach_R[0]
    needed_LE[hot_LE] += np.searchsorted(reach_R, spread_LE[hot_LE], side="left")
    impossible_LE = needed_LE > reach_R.size
    return np.where(impossible_LE.any(axis=1), np.iinfo(np.int64).max, needed_LE.sum(axis=1))
