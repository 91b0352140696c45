"""Local search from a given map: few single changes that bring the most loaded ranks of each layer down.

Each sweep changes something between the most and the least loaded rank of a layer, between the next most and the next
least, and so on, until the changes move as much as the layer has above its target. Then it solves the split anew, and
the changes stay if the ranks above the target came down together. A layer begins with bold sweeps, whose few changes
relieve many ranks where load flows between them (see `pairs`); from the first that fails it goes on carefully, and
after a careful one that fails with fewer and other pairs. No layer ends up worse than it was.

Axes: L layers, E logical experts, P places, R ranks; A layers under work.
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
BOLD_REACH = 4
"""Ranks that a bold sweep counts on to share what a change moves; a careful one counts on none."""
NARROWING = 4
MAX_FAILURES = 5
LEAST_GAIN = 0.02
"""A sweep is kept if it lowers the sum of squares of what ranks have above the target by this share."""


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
    start_LP, start_tokens_LP = table_LP, tokens_LP
    table_LP, tokens_LP = table_LP.copy(), tokens_LP.copy()
    level_LR = objective.level_LR(tokens_LP)
    failures_L = np.zeros(len(table_LP), dtype=np.int64)
    is_bold_L = np.full(len(table_LP), objective.weighted_split)
    records_left = np.iinfo(np.int64).max if max_records is None else max_records
    for _ in range(MAX_SWEEPS):
        active = np.flatnonzero((level_LR.max(axis=1) > target_L) & (failures_L < MAX_FAILURES))
        if not active.size or records_left <= 0:
            break
        fixed_AP = fixed_LP[active]
        if in_force_LP is not None and max_incoming is not None:
            # A sweep changes one place of a rank at most, so what has room for one more keeps to the limit.
            fixed_AP |= closed_places(in_force_LP[active], table_LP[active], objective.cluster, max_incoming)
        state = MapState(
            table_LP=table_LP[active],
            fixed_LP=fixed_AP,
            num_replicas_LE=count_replicas(table_LP[active], load_LE.shape[1])[:, :-1],
            cost_LP=objective.cost.of_places(tokens_LP[active]),
            level_LR=level_LR[active],
            target_L=target_L[active],
            turn_L=failures_L[active],
            reach_L=np.where(is_bold_L[active], BOLD_REACH, 1),
        )
        changes = _sweep(state, objective)
        if max_records is not None:
            changes = _affordable(changes, records_left)
        new_table_AP = changes.apply(state.table_LP)
        new_tokens_AP = objective.tokens(new_table_AP, load_LE[active], tokens_LP[active])
        new_level_AR = objective.level_LR(new_tokens_AP)
        helps_A = _helps(state, new_table_AP, new_level_AR, objective)
        kept, failed = active[helps_A], active[~helps_A]
        table_LP[kept], tokens_LP[kept] = new_table_AP[helps_A], new_tokens_AP[helps_A]
        level_LR[kept] = new_level_AR[helps_A]
        failures_L[kept] = np.maximum(failures_L[kept] - 1, 0)
        failures_L[failed] += ~is_bold_L[failed]
        is_bold_L[failed] = False
        records_left -= int(changes.num_records_L(active.size)[helps_A].sum())
    worse_L = level_LR.max(axis=1) > objective.level_LR(start_tokens_LP).max(axis=1)
    table_LP[worse_L], tokens_LP[worse_L] = start_LP[worse_L], start_tokens_LP[worse_L]
    return table_LP, tokens_LP


def _sweep(state: MapState, objective: Objective) -> Changes:
    """Changes of every layer: fewer pairs after failures, and none more once enough moves."""
    cluster = objective.cluster
    most_pairs = min(cluster.num_ranks // 2, max(LEAST_PAIRS, cluster.num_ranks // RANKS_PER_PAIR))
    width_L = np.maximum(1, most_pairs // NARROWING**state.turn_L)
    above_LR = np.maximum(state.level_LR - state.target_L[:, None], 0.0) * cluster.capacity_R
    # A rank that is not above the target has nothing to give away, so the pairs after it need no look.
    num_pairs_L = np.minimum(np.minimum(width_L, most_pairs), (above_LR > 0.0).sum(axis=1))
    changes = best_changes(
        state,
        cluster,
        num_pairs=int(num_pairs_L.max()),
        flows=objective.weighted_split,
        spread=objective.spread_over_nodes,
    )
    changes = changes.select(changes.pair_M < width_L[changes.layer_M])
    return changes.until_moved(above_LR.sum(axis=1)) if objective.weighted_split else changes


def _affordable(changes: Changes, num_records: int) -> Changes:
    """The changes with most gain for each record, of all layers."""
    order_M = np.argsort(-changes.score_M, kind="stable")
    keep_M = np.zeros(order_M.size, dtype=bool)
    keep_M[order_M] = np.cumsum(changes.num_records_M[order_M]) <= num_records
    return changes.select(keep_M)


def _helps(state: MapState, new_LP: IntArray, new_LR: FloatArray, objective: Objective) -> BoolArray:
    """Whether the ranks above the target came down together; one of them may have gone up meanwhile."""
    target_L1 = state.target_L[:, None]
    old_L = (np.maximum(state.level_LR - target_L1, 0.0) ** 2).sum(axis=1)
    helps_L = (np.maximum(new_LR - target_L1, 0.0) ** 2).sum(axis=1) < old_L * (1.0 - LEAST_GAIN)
    if objective.spread_over_nodes:
        helps_L &= _as_spread(new_LP, state, objective.cluster)
    helps: BoolArray = helps_L
    return helps


def _as_spread(new_LP: IntArray, state: MapState, cluster: Cluster) -> BoolArray:
    """Two changes of one sweep, each within the rule, can break it together."""
    num_experts = state.num_replicas_LE.shape[1]
    as_spread: BoolArray = num_crowded(new_LP, num_experts, cluster) <= num_crowded(
        state.table_LP, num_experts, cluster
    )
    return as_spread
