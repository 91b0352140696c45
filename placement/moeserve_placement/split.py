"""How the tokens of a logical expert are split over its replicas: evenly, or so that ranks are as even as can be.

The best split for a fixed map solves a convex problem: minimise sum_r load_r^2 / capacity_r over all ways to pour each
replicated expert's tokens into the ranks that hold it. Its solution is the lexicographically smallest vector of
load_r / capacity_r, so it also minimises the largest (Hajek, "Performance of global load balancing by local
adjustment", IEEE Trans. Inf. Theory 36(6), 1990). We solve it for all layers at once by accelerated projected
gradient (Beck and Teboulle, FISTA, SIAM J. Imaging Sci. 2(1), 2009) with a restart where the objective rises
(O'Donoghue and Candes, Found. Comput. Math. 15, 2015). A step for one expert is a water-filling: add what the gradient
asks, then lower all replicas together until their sum is right, none below zero.

Axes: L layers, E logical experts, P places, R ranks; K replicas of replicated experts and X replicated experts, both
flattened over the layers.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import (
    FloatArray,
    IntArray,
    count_replicas,
    divide,
    flat_experts,
    sum_flat,
    with_column,
)
from moeserve_placement.cluster import Cluster
from moeserve_placement.placement import PlacementError

CHECK_EVERY = 5
SETTLED = 0.25
"""A layer whose highest rank came down by less than this part of the tolerance between two checks has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a split is solved."""

    tolerance: float
    """How far from perfect balance, or from the optimum where that is worse, the highest rank may stay."""
    max_iterations: int


ROUGH = Effort(tolerance=2e-3, max_iterations=30)
"""Enough to tell a good map from a better one."""
CLOSE = Effort(tolerance=5e-4, max_iterations=60)
"""For a split that is handed out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Replicas:
    """The replicas whose load may flow, and what lies fixed beside them."""

    shape: tuple[int, int, int]
    """Layers, places, ranks."""
    place_K: IntArray
    """Flat index into layers x places."""
    rank_K: IntArray
    """Flat index into layers x ranks."""
    layer_K: IntArray
    expert_K: IntArray
    """Index of the replicated expert, 0 .. X - 1."""
    tokens_X: FloatArray
    num_replicas_X: IntArray
    tokens_LP: FloatArray
    """Tokens of places whose expert has no other replica; 0 elsewhere."""
    fixed_R: FloatArray
    """Load of each rank (flat, layers x ranks) that cannot flow."""


def even_tokens(table_LP: IntArray, load_LE: FloatArray) -> FloatArray:
    """Tokens on each place when replicas share evenly; 0 on an empty place (-1)."""
    num_experts = load_LE.shape[1]
    share_LE = with_column(load_LE, 0.0) / np.maximum(count_replicas(table_LP, num_experts), 1)
    tokens: FloatArray = share_LE.ravel()[flat_experts(table_LP, num_experts)]
    return tokens


def balanced_tokens(
    table_LP: IntArray,
    load_LE: FloatArray,
    cluster: Cluster,
    *,
    offset_LR: FloatArray | None = None,
    start_LP: FloatArray | None = None,
    effort: Effort = CLOSE,
) -> FloatArray:
    """Tokens on each place [L, P] under the split that makes the largest rank load / capacity smallest.

    offset_LR: load a rank carries whatever the split. start_LP: tokens to start from, such as the last window's
    split; only its proportions between the replicas of one expert count.
    """
    replicas = _index(table_LP, load_LE, cluster, offset_LR)
    if not replicas.place_K.size:
        return replicas.tokens_LP
    tokens_K = _pour(replicas, cluster, _start(replicas, start_LP), effort)
    tokens_LP = replicas.tokens_LP.copy()
    tokens_LP.ravel()[replicas.place_K] = tokens_K
    return tokens_LP


def tokens_in_force(table_LP: IntArray, load_LE: FloatArray, split_LP: FloatArray | None) -> FloatArray:
    """Tokens on each place under a given split; None: even. Raises PlacementError where it has another shape."""
    if split_LP is None:
        return even_tokens(table_LP, load_LE)
    if split_LP.shape != table_LP.shape:
        raise PlacementError(f"the split must have the placement's shape {table_LP.shape}, got {split_LP.shape}")
    tokens: FloatArray = split_LP * with_column(load_LE, 0.0).ravel()[flat_experts(table_LP, load_LE.shape[1])]
    return tokens


def shares(table_LP: IntArray, tokens_LP: FloatArray, load_LE: FloatArray) -> FloatArray:
    """Split [L, P]: the share of its logical expert's tokens that each place takes; even where there are none."""
    total_LP = with_column(load_LE, 0.0).ravel()[flat_experts(table_LP, load_LE.shape[1])]
    has_load_LP = total_LP > 0
    split: FloatArray = np.divide(tokens_LP, total_LP, out=np.zeros(total_LP.shape), where=has_load_LP)
    if not has_load_LP.all():
        split[~has_load_LP] = even_tokens(table_LP, np.ones_like(load_LE))[~has_load_LP]
    return split


def _index(table_LP: IntArray, load_LE: FloatArray, cluster: Cluster, offset_LR: FloatArray | None) -> _Replicas:
    num_layers, num_places = table_LP.shape
    num_experts, num_ranks = load_LE.shape[1], cluster.num_ranks
    flat = flat_experts(table_LP, num_experts).ravel()
    count = np.bincount(flat, minlength=num_layers * (num_experts + 1))
    # Empty places are no replicas of one another.
    count[num_experts :: num_experts + 1] = 0
    is_replicated = count > 1
    place_K = np.flatnonzero(is_replicated[flat])
    rank = (np.arange(num_layers)[:, None] * num_ranks + cluster.rank_of_place_P).ravel()
    tokens = with_column(load_LE, 0.0).ravel()
    single = tokens[flat]
    single[place_K] = 0.0
    fixed_R = sum_flat(rank, single, num_layers * num_ranks)
    return _Replicas(
        shape=(num_layers, num_places, num_ranks),
        place_K=place_K,
        rank_K=rank[place_K],
        layer_K=place_K // num_places,
        expert_K=(np.cumsum(is_replicated) - 1)[flat[place_K]],
        tokens_X=tokens[is_replicated],
        num_replicas_X=count[is_replicated],
        tokens_LP=single.reshape(num_layers, num_places),
        fixed_R=fixed_R if offset_LR is None else fixed_R + offset_LR.ravel(),
    )


def _start(replicas: _Replicas, start_LP: FloatArray | None) -> FloatArray:
    even_K: FloatArray = (replicas.tokens_X / replicas.num_replicas_X)[replicas.expert_K]
    if start_LP is None:
        return even_K
    warm_K = start_LP.ravel()[replicas.place_K]
    sum_X = sum_flat(replicas.expert_K, warm_K, replicas.tokens_X.size)
    scale_K = divide(replicas.tokens_X, sum_X, 0.0)[replicas.expert_K]
    return np.where(scale_K > 0, warm_K * scale_K, even_K)


def _pour(replicas: _Replicas, cluster: Cluster, tokens_K: FloatArray, effort: Effort) -> FloatArray:
    """Tokens of each replica at the optimum, or the best met within the iterations."""
    num_layers, _, num_ranks = replicas.shape
    rank_K, layer_K, slowness_R = replicas.rank_K, replicas.layer_K, 1.0 / cluster.capacity_R
    fixed_LR = replicas.fixed_R.reshape(num_layers, num_ranks)
    # A rank with n flowing replicas couples them by a block of ones, which n times the identity bounds from above:
    # so each replica has its own safe step, capacity / n, which takes load / n off it.
    per_replica_LR = 1.0 / np.maximum(_by_rank(replicas, np.ones(rank_K.size)), 1.0)
    step_K = (per_replica_LR * cluster.capacity_R).take(rank_K)
    step_X = sum_flat(replicas.expert_K, step_K, replicas.tokens_X.size)
    load_LR = fixed_LR + _by_rank(replicas, tokens_K)
    perfect_L = load_LR.sum(axis=1) / cluster.capacity_R.sum()
    best_K, lowest_L = tokens_K, (load_LR * slowness_R).max(axis=1)
    ahead_K, ahead_load_LR = tokens_K, load_LR
    momentum_L, objective_L = np.ones(num_layers), np.full(num_layers, np.inf)
    for iteration in range(1, effort.max_iterations + 1):
        new_K = _descend(replicas, ahead_K, (ahead_load_LR * per_replica_LR).take(rank_K), step_K, step_X)
        new_load_LR = fixed_LR + _by_rank(replicas, new_K)
        last_objective_L, objective_L = objective_L, (new_load_LR**2 * slowness_R).sum(axis=1)
        restart_L = objective_L > last_objective_L
        next_L = (1.0 + np.sqrt(1.0 + 4.0 * momentum_L**2)) / 2.0
        beta_L = np.where(restart_L, 0.0, (momentum_L - 1.0) / next_L)
        momentum_L = np.where(restart_L, 1.0, next_L)
        # Loads are linear in the tokens, so the point ahead needs no second sum over replicas.
        ahead_K = new_K + beta_L.take(layer_K) * (new_K - tokens_K)
        ahead_load_LR = new_load_LR + beta_L[:, None] * (new_load_LR - load_LR)
        tokens_K, load_LR = new_K, new_load_LR
        if iteration % CHECK_EVERY == 0 or iteration == effort.max_iterations:
            highest_L = (load_LR * slowness_R).max(axis=1)
            best_K = np.where((highest_L < lowest_L)[layer_K], tokens_K, best_K)
            last_lowest_L, lowest_L = lowest_L, np.minimum(lowest_L, highest_L)
            settled_L = lowest_L > last_lowest_L * (1.0 - SETTLED * effort.tolerance)
            if (settled_L | (perfect_L >= lowest_L * (1.0 - effort.tolerance))).all():
                break
    return best_K


def _descend(
    replicas: _Replicas, tokens_K: FloatArray, drop_K: FloatArray, step_K: FloatArray, step_X: FloatArray
) -> FloatArray:
    """One step of so much down the slope, projected back: no tokens below zero, and each expert's sum as it was.

    The projection is the nearest point in the metric 1 / step.
    """
    expert_K = replicas.expert_K
    level_X = np.bincount(expert_K, drop_K, step_X.size) / step_X
    new_K: FloatArray = tokens_K - drop_K + level_X.take(expert_K) * step_K
    below = np.flatnonzero(new_K < 0.0)
    if not below.size:
        return new_K
    # Only experts that went below zero are corrected. One correction over their replicas left above it is exact for two
    # replicas and nearly so for more; scaling keeps the sum exact, and the next iteration makes up for the rest.
    hit_X = np.zeros(step_X.size, dtype=bool)
    hit_X[expert_K[below]] = True
    corrected, hit = np.flatnonzero(hit_X), np.flatnonzero(hit_X.take(expert_K))
    nth = np.searchsorted(corrected, expert_K[hit])
    tokens, wanted, step = replicas.tokens_X[corrected], tokens_K[hit] - drop_K[hit], step_K[hit]
    above = new_K[hit] > 0.0
    level = sum_flat(nth, wanted * above, corrected.size) - tokens
    level /= _positive(sum_flat(nth, step * above, corrected.size))
    filled = np.maximum(wanted - level[nth] * step, 0.0) * above
    scale = tokens / _positive(sum_flat(nth, filled, corrected.size))
    new_K[hit] = filled * scale[nth]
    return new_K


def _by_rank(replicas: _Replicas, values_K: FloatArray) -> FloatArray:
    """Values of the replicas added up for each rank [L, R]."""
    num_layers, _, num_ranks = replicas.shape
    return sum_flat(replicas.rank_K, values_K, num_layers * num_ranks).reshape(num_layers, num_ranks)


def _positive(values: FloatArray) -> FloatArray:
    """Zeros replaced by ones: where no tokens remain, the quotient is never used."""
    return np.where(values > 0.0, values, 1.0)
