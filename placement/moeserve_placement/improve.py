"""Local search from a given map: few single changes that bring the most loaded ranks of each layer down.

Each sweep changes something between the most and the least loaded rank of a layer, between the next most and the next
least, and so on, until the changes move as much as the layer has above its target. It tries that carefully and boldly
(see `pairs`), solves the split anew for each try, and keeps the one that brings the highest rank down most for each
record moved, or none: no layer ever gets worse. A layer whose sweep failed tries fewer and other pairs.

Axes: L layers, E logical experts, P places, R ranks; T tries, one run for each layer under work.
"""

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray, count_replicas
from moeserve_placement.changes import Changes, best_changes
from moeserve_placement.cluster import Cluster
from moeserve_placement.constraints import num_crowded
from moeserve_placement.incoming import closed_places
from moeserve_placement.objective import Objective
from moeserve_placement.pairs import MapState

MAX_SWEEPS = 48
RANKS_PER_PAIR = 8
LEAST_PAIRS = 2
"""A sweep changes a quarter of what it could: one change moves load for all ranks its replicas can flow to."""
REACHES = (1, 4)
"""Ranks that a careful and a bold try count on to share what a change moves."""
NARROWING = 4
MAX_FAILURES = 5
LEAST_GAIN = 1e-5
"""A sweep must lower the highest rank by this share to be kept."""


def improve(
    table_LP: IntArray,
    load_LE: FloatArray,
    tokens_LP: FloatArray,
    objective: Objective,
    *,
    fixed_LP: BoolArray,
    target_L: FloatArray,
    max_records: int | None = None,
    in_force_LP: IntArray | None = None,
    max_incoming: int | None = None,
) -> tuple[IntArray, FloatArray]:
    """Tables and tokens [L, P] in which layers above `target_L` came down as far as single changes bring them.

    max_records: expert records that may move in all layers together; they go where they gain most. max_incoming: the
    most places of a rank that may differ from `in_force_LP` in any layer.
    """
    table_LP, tokens_LP = table_LP.copy(), tokens_LP.copy()
    level_LR = objective.level_LR(tokens_LP)
    failures_L = np.zeros(len(table_LP), dtype=np.int64)
    reaches = REACHES if objective.weighted_split else REACHES[:1]
    records_left = np.iinfo(np.int64).max if max_records is None else max_records
    for _ in range(MAX_SWEEPS):
        active = np.flatnonzero((level_LR.max(axis=1) > target_L) & (failures_L < MAX_FAILURES))
        if not active.size or records_left <= 0:
            break
        tried = np.repeat(active, len(reaches))
        fixed_TP = fixed_LP[tried]
        if in_force_LP is not None and max_incoming is not None:
            # A sweep changes one place of a rank at most, so what has room for one more keeps to the limit.
            fixed_TP |= closed_places(in_force_LP[tried], table_LP[tried], objective.cluster, max_incoming)
        state = MapState(
            table_LP=table_LP[tried],
            fixed_LP=fixed_TP,
            num_replicas_LE=count_replicas(table_LP[tried], load_LE.shape[1])[:, :-1],
            cost_LP=objective.cost.of_places(tokens_LP[tried]),
            level_LR=level_LR[tried],
            target_L=target_L[tried],
            turn_L=failures_L[tried],
            reach_L=np.tile(np.asarray(reaches), active.size),
        )
        changes = _sweep(state, objective)
        if max_records is not None:
            changes = _affordable(changes, len(reaches), records_left)
        new_table_TP = changes.apply(state.table_LP)
        new_tokens_TP = objective.tokens(new_table_TP, load_LE[tried], tokens_LP[tried])
        new_level_TR = objective.level_LR(new_tokens_TP)
        num_records_T = changes.num_records_L(tried.size)
        gain_T = _gain_per_record(state, new_table_TP, new_level_TR, num_records_T, objective)
        best = gain_T.reshape(-1, len(reaches)).argmax(axis=1) + np.arange(active.size) * len(reaches)
        helps = np.isfinite(gain_T[best])
        kept, source = active[helps], best[helps]
        table_LP[kept], tokens_LP[kept] = new_table_TP[source], new_tokens_TP[source]
        level_LR[kept] = new_level_TR[source]
        failures_L[kept] = np.maximum(failures_L[kept] - 1, 0)
        failures_L[active[~helps]] += 1
        records_left -= int(num_records_T[source].sum())
    return table_LP, tokens_LP


def _sweep(state: MapState, objective: Objective) -> Changes:
    """Changes of every try: fewer pairs after failures, and none more once enough moves."""
    cluster = objective.cluster
    num_pairs = min(cluster.num_ranks // 2, max(LEAST_PAIRS, cluster.num_ranks // RANKS_PER_PAIR))
    changes = best_changes(
        state,
        cluster,
        num_pairs=num_pairs,
        flows=objective.weighted_split,
        spread=objective.spread_over_nodes,
    )
    width_L = np.maximum(1, num_pairs // NARROWING**state.turn_L)
    changes = changes.select(changes.pair_M < width_L[changes.layer_M])
    if not objective.weighted_split:
        return changes
    above_LR = np.maximum(state.level_LR - state.target_L[:, None], 0.0) * cluster.capacity_R
    return changes.until_moved(above_LR.sum(axis=1))


def _affordable(changes: Changes, num_tries: int, num_records: int) -> Changes:
    """The changes with most gain for each record, of all layers, whichever of its tries a layer keeps."""
    order_M = np.argsort(-changes.score_M, kind="stable")
    keep_M = np.zeros(order_M.size, dtype=bool)
    for attempt in range(num_tries):
        of_try_M = order_M[changes.layer_M[order_M] % num_tries == attempt]
        keep_M[of_try_M] = np.cumsum(changes.num_records_M[of_try_M]) <= num_records // num_tries
    return changes.select(keep_M)


def _gain_per_record(
    state: MapState, new_LP: IntArray, new_LR: FloatArray, num_records_L: IntArray, objective: Objective
) -> FloatArray:
    """How far the highest rank came down, to its target at most, for each record; -inf where it did not help.

    It helps too if the highest rank stayed, as one of several equally high, while the ranks came closer together.
    """
    old_LR = state.level_LR
    old_highest_L, new_highest_L = old_LR.max(axis=1), new_LR.max(axis=1)
    closer_L = (new_LR**2).sum(axis=1) < (old_LR**2).sum(axis=1) * (1.0 - LEAST_GAIN)
    helps_L = new_highest_L < old_highest_L * (1.0 - LEAST_GAIN)
    helps_L |= closer_L & (new_highest_L <= old_highest_L)
    if objective.spread_over_nodes:
        helps_L &= _as_spread(new_LP, state, objective.cluster)
    lowered_L = old_highest_L - np.maximum(new_highest_L, state.target_L)
    return np.where(helps_L, lowered_L / np.maximum(num_records_L, 1), -np.inf)


def _as_spread(new_LP: IntArray, state: MapState, cluster: Cluster) -> BoolArray:
    """Two changes of one sweep, each within the rule, can break it together."""
    num_experts = state.num_replicas_LE.shape[1]
    as_spread: BoolArray = num_crowded(new_LP, num_experts, cluster) <= num_crowded(
        state.table_LP, num_experts, cluster
    )
    return as_spread
