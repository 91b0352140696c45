"""How many replicas: of each expert within a layer, and how many redundant experts each layer is worth.

Within a layer replicas go where they lower the hottest replica most. Giving the next replica to the expert with most
tokens per replica is the divisor method of D'Hondt, so the result is known without the sequence: the smallest level
such that ceil(load / level) replicas of every expert fit. It is found by bisection for all layers at once.

Axes: L layers, E logical experts, K redundant experts of a layer, counted from 0.
"""

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray, run_index
from moeserve_placement.cluster import Cluster
from moeserve_placement.placement import PlacementError

BISECTIONS = 32
"""So close to the level that hardly a layer has replicas left to hand out."""


def replica_counts(
    load_LE: FloatArray, num_physical_L: IntArray, max_replicas: int, least_LE: IntArray | None = None
) -> IntArray:
    """Replicas [L, E] that sum to `num_physical_L` and make the largest load per replica smallest.

    max_replicas: the ranks that can each hold one. least_LE: replicas an expert must have, at least 1; 0 for an expert
    that is not of this layer, which then gets none. Raises PlacementError where the sum cannot be met.
    """
    least = np.ones_like(load_LE, dtype=np.int64) if least_LE is None else least_LE
    most = np.where(least > 0, max_replicas, 0)
    if (least > most).any() or (least.sum(axis=1) > num_physical_L).any() or (most.sum(axis=1) < num_physical_L).any():
        raise PlacementError(
            f"num_physical must be in [{least.sum(axis=1).max()}, {most.sum(axis=1).min()}] for {load_LE.shape[1]} "
            f"experts with at most {max_replicas} replicas each, got {num_physical_L.min()} to {num_physical_L.max()}"
        )
    level_L = _lowest_level(load_LE, num_physical_L, least, most)
    counts_LE = _at_level(load_LE, level_L, least, most).astype(np.int64)
    return _hand_out(load_LE, counts_LE, most, num_physical_L - counts_LE.sum(axis=1))


def _lowest_level(load_LE: FloatArray, num_physical_L: IntArray, least: IntArray, most: IntArray) -> FloatArray:
    # No level under the mean load of a place can do: ceil(load / level) would sum to more than the places.
    total_L = load_LE.sum(axis=1)
    low_L, high_L = total_L / num_physical_L, np.maximum(load_LE.max(axis=1), total_L)
    for _ in range(BISECTIONS):
        level_L = (low_L + high_L) / 2.0
        fits_L = _at_level(load_LE, level_L, least, most).sum(axis=1) <= num_physical_L
        high_L, low_L = np.where(fits_L, level_L, high_L), np.where(fits_L, low_L, level_L)
    level: FloatArray = high_L
    return level


def _at_level(load_LE: FloatArray, level_L: FloatArray, least: IntArray, most: IntArray) -> FloatArray:
    needed_LE = load_LE * (1.0 / np.maximum(level_L, 1e-300))[:, None]
    np.ceil(needed_LE, out=needed_LE)
    np.minimum(needed_LE, most, out=needed_LE)
    np.maximum(needed_LE, least, out=needed_LE)
    return needed_LE


def _hand_out(load_LE: FloatArray, counts_LE: IntArray, most_LE: IntArray, left_L: IntArray) -> IntArray:
    """Experts whose loads tie at the level: replicas that are left go to the most loaded per replica."""
    counts_LE, left_L = counts_LE.copy(), left_L.copy()
    while (rows := np.flatnonzero(left_L)).size:
        count = counts_LE[rows]
        is_open = count < most_LE[rows]
        order = np.argsort(np.where(is_open, -load_LE[rows] / np.maximum(count, 1), np.inf), axis=1, kind="stable")
        given = np.minimum(left_L[rows], is_open.sum(axis=1))
        row, nth = np.repeat(np.arange(rows.size), given), run_index(given)
        counts_LE[rows[row], order[row, nth]] += 1
        left_L[rows] -= given
    return counts_LE


def physical_by_layer(load_LE: FloatArray, cluster: Cluster, num_redundant: int) -> IntArray:
    """Physical experts [L] of each layer when `num_redundant` experts may be added in all layers together.

    A layer's highest rank cannot be below its hottest replica, nor below the mean. Redundant experts go where each
    takes most tokens off that, over the lower convex hull of the layer's curve: where only a second one brings the
    gain, the two share it. What is left when every layer is at its mean goes to the hottest replicas relative to the
    mean, which makes room for drift.
    Raises PlacementError where the cluster has no room for so many.
    """
    num_layers, num_experts = load_LE.shape
    most = min(cluster.num_physical_experts - num_experts, num_experts * (cluster.num_ranks - 1))
    if not 0 <= num_redundant <= most * num_layers:
        raise PlacementError(
            f"num_redundant must be in [0, {most * num_layers}] for {num_layers} layers of {num_experts} experts on "
            f"{cluster.num_physical_experts} places, got {num_redundant}"
        )
    mean_L = load_LE.sum(axis=1) / cluster.capacity_R.sum() * cluster.capacity_R.max()
    hottest_LK = _hottest_replica(load_LE, most)
    level_LK = np.maximum(hottest_LK, mean_L[:, None])
    gain_LK = np.stack([_hull_slopes(level_K) for level_K in level_LK]) if most else np.zeros((num_layers, 0))
    relative_LK = hottest_LK[:, :most] / np.maximum(mean_L, 1e-300)[:, None]
    order = np.lexsort((-relative_LK.ravel(), -gain_LK.ravel()))
    layer = order[:num_redundant] // max(most, 1)
    num_physical_L: IntArray = num_experts + np.bincount(layer, minlength=num_layers)
    return num_physical_L


def _hottest_replica(load_LE: FloatArray, most: int) -> FloatArray:
    """Load of the hottest replica [L, K + 1] with 0 to `most` redundant experts, each given to the hottest."""
    num_layers, num_experts = load_LE.shape
    one = np.ones_like(load_LE, dtype=np.int64)
    level_L1 = _lowest_level(load_LE, np.full(num_layers, num_experts + most), one, one * (most + 1))[:, None]
    divisor = np.arange(1, 2 + int(np.ceil(load_LE.max(axis=1, keepdims=True) / np.maximum(level_L1, 1e-300)).max()))
    quotient = (load_LE[:, :, None] / divisor).reshape(num_layers, -1)
    if quotient.shape[1] <= most:
        quotient = np.pad(quotient, ((0, 0), (0, most + 1 - quotient.shape[1])))
    return -np.sort(np.partition(-quotient, most, axis=1)[:, : most + 1], axis=1)


def _hull_slopes(level_K: FloatArray) -> FloatArray:
    """Drop per step along the lower convex hull of a falling curve."""
    drops = -np.diff(level_K)
    # Pool adjacent steps until the drops fall from left to right.
    total, length = [], []
    for drop in drops:
        total.append(float(drop))
        length.append(1)
        while len(total) > 1 and total[-2] * length[-1] < total[-1] * length[-2]:
            total[-2:], length[-2:] = [total[-2] + total[-1]], [length[-2] + length[-1]]
    return np.repeat(np.asarray(total) / np.asarray(length), length) if total else drops
