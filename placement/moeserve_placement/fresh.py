"""Maps from the loads alone: replica counts, packing, then local search where the packing is not yet as good as can be.

Axes: L layers, E logical experts, P places.
"""

import numpy as np

from moeserve_placement import eplb, packing, replicas
from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.enforce import spread
from moeserve_placement.improve import improve
from moeserve_placement.problem import Problem
from moeserve_placement.split import even_tokens

GOAL = 0.997
"""Share of the bound below which a layer is searched further: no expert moves for it yet, so it costs only time."""


def fresh_tables(problem: Problem) -> tuple[IntArray, FloatArray]:
    """Table and tokens [L, P]. Raises PlacementError where the experts do not fit the places."""
    table_LP = _packed(problem)
    table_LP, tokens_LP = _searched(problem, table_LP, problem.objective.tokens(table_LP, problem.load_LE))
    target_L = problem.target_L(tokens_LP, GOAL)
    rows = np.flatnonzero(problem.objective.level_LR(tokens_LP).max(axis=1) > target_L)
    if rows.size and _eplb_fits(problem):
        # A second start, and the proof that no layer ends up worse than EPLB's.
        _keep_better(problem, rows, table_LP, tokens_LP)
    return table_LP, tokens_LP


def _packed(problem: Problem) -> IntArray:
    pinned_LE = np.zeros(problem.load_LE.shape, dtype=np.int64)
    np.add.at(pinned_LE, (problem.pin_layer_M, problem.pin_expert_M), 1)
    least_LE = np.where(problem.present_LE, np.maximum(pinned_LE, 1), 0)
    num_open = int((problem.room_LR > 0).sum(axis=1).min())
    count_LE = replicas.replica_counts(problem.load_LE, problem.room_LR.sum(axis=1), num_open, least_LE)
    table_LP = packing.pack(
        packing.PackingInput(
            load_LE=problem.load_LE,
            count_LE=count_LE,
            room_LR=problem.room_LR,
            cluster=problem.cluster,
            pin_layer_M=problem.pin_layer_M,
            pin_expert_M=problem.pin_expert_M,
            pin_rank_M=problem.pin_rank_M,
            spread_over_nodes=problem.objective.spread_over_nodes,
        )
    )
    if problem.objective.spread_over_nodes:
        fixed_LP = problem.fixed_LP(table_LP)
        tokens_LP = even_tokens(table_LP, problem.load_LE)
        table_LP = spread(table_LP, tokens_LP, fixed_LP, problem.num_experts, problem.cluster)
    return table_LP


def _searched(problem: Problem, table_LP: IntArray, tokens_LP: FloatArray) -> tuple[IntArray, FloatArray]:
    return improve(
        table_LP,
        problem.load_LE,
        tokens_LP,
        problem.objective,
        fixed_LP=problem.fixed_LP(table_LP),
        target_L=problem.target_L(tokens_LP, GOAL),
    )


def _eplb_fits(problem: Problem) -> bool:
    """EPLB knows equal ranks only, and none of the rules."""
    cluster = problem.cluster
    sizes = np.asarray(cluster.num_physical_by_rank)
    return bool(
        problem.present_LE.all()
        and (problem.room_LR == sizes).all()
        and (sizes == sizes[0]).all()
        and (cluster.capacity_R == cluster.capacity_R[0]).all()
        and not problem.pin_layer_M.size
        and not problem.objective.spread_over_nodes
    )


def _keep_better(problem: Problem, rows: IntArray, table_LP: IntArray, tokens_LP: FloatArray) -> None:
    """Search these layers from EPLB's map too, and put what is better into `table_LP` and `tokens_LP`."""
    part, cluster, objective = problem.of_layers(rows), problem.cluster, problem.objective
    as_published_LP = eplb.eplb_global(
        part.load_LE, num_physical=cluster.num_physical_experts, num_ranks=cluster.num_ranks
    )
    start_LP = eplb.merge_twins(as_published_LP, part.load_LE, cluster)
    # Where a twin was overwritten, its tokens start on the replica that stayed: as level as EPLB's own.
    start_tokens_LP = even_tokens(as_published_LP, part.load_LE)
    changed_LP = start_LP != as_published_LP
    for layer, place in np.argwhere(changed_LP):
        on_rank = cluster.rank_of_place_P == cluster.rank_of_place_P[place]
        stays = np.flatnonzero(on_rank & ~changed_LP[layer] & (start_LP[layer] == as_published_LP[layer, place]))
        start_tokens_LP[layer, stays] += start_tokens_LP[layer, place]
        start_tokens_LP[layer, place] = 0.0
    start_tokens_LP = objective.tokens(start_LP, part.load_LE, start_tokens_LP)
    other_LP, other_tokens_LP = _searched(part, start_LP, start_tokens_LP)
    better = objective.level_LR(other_tokens_LP).max(axis=1) < objective.level_LR(tokens_LP[rows]).max(axis=1)
    table_LP[rows[better]], tokens_LP[rows[better]] = other_LP[better], other_tokens_LP[better]
