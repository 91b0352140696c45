"""Plan the maps of some layers: as one problem, or node by node where expert groups keep to their node.

Axes: L layers, E logical experts, G groups, P places, R ranks.
"""

import numpy as np

from moeserve_placement import domains
from moeserve_placement.arrays import BoolArray, FloatArray, IntArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.fresh import fresh_tables
from moeserve_placement.incoming import fits
from moeserve_placement.incremental import incremental_tables, num_records
from moeserve_placement.moves import keep_in_place
from moeserve_placement.placement import PlacementError
from moeserve_placement.problem import Problem
from moeserve_placement.settings import PlanSettings


def plan_tables(
    problem: Problem, table_LP: IntArray, tokens_LP: FloatArray, settings: PlanSettings
) -> tuple[IntArray, FloatArray]:
    """The next tables and their tokens [L, P].

    table_LP: the map in force, all -1 in a layer that has none. tokens_LP: its tokens under the best split.
    """
    max_records = None if settings.budget_bytes is None else settings.budget_bytes // settings.expert_bytes
    if settings.constraints.group_of_expert is not None:
        return _node_by_node(problem, table_LP, tokens_LP, settings, max_records)
    anew_L: BoolArray = np.all(table_LP < 0, axis=1)
    return _solve(problem, table_LP, tokens_LP, anew_L, goal=settings.goal, max_records=max_records)


def room_by_layer(cluster: Cluster, num_physical_L: IntArray) -> IntArray:
    """Places [L, R] each rank may use, in proportion to its places; over the layers ranks come out even.

    Raises PlacementError where a layer has more physical experts than the cluster has places.
    """
    if (num_physical_L > cluster.num_physical_experts).any():
        raise PlacementError(
            f"num_physical_by_layer must be at most {cluster.num_physical_experts}, the places of the cluster, got "
            f"{num_physical_L.max()}"
        )
    sizes_R = np.asarray(cluster.num_physical_by_rank)
    if (num_physical_L == cluster.num_physical_experts).all():
        return np.tile(sizes_R, (num_physical_L.size, 1))
    share_LR = num_physical_L[:, None] * sizes_R / cluster.num_physical_experts
    room_LR = np.floor(share_LR + 1e-9).astype(np.int64)
    owed_R = np.zeros(cluster.num_ranks)
    for layer, room_R in enumerate(room_LR):
        owed_R += share_LR[layer] - room_R
        short = int(num_physical_L[layer] - room_R.sum())
        first = np.argsort(np.where(room_R < sizes_R, -owed_R, np.inf), kind="stable")[:short]
        room_R[first] += 1
        owed_R[first] -= 1.0
    room: IntArray = room_LR
    return room


def _solve(
    problem: Problem,
    table_LP: IntArray,
    tokens_LP: FloatArray,
    anew_L: BoolArray,
    *,
    goal: float,
    max_records: int | None,
) -> tuple[IntArray, FloatArray]:
    new_LP, tokens_LP = table_LP.copy(), tokens_LP.copy()
    anew, kept = np.flatnonzero(anew_L), np.flatnonzero(~anew_L)
    if anew.size:
        fresh_LP, fresh_tokens_LP = fresh_tables(problem.of_layers(anew))
        if (table_LP[anew] >= 0).any():
            fresh_LP, fresh_tokens_LP = keep_in_place(fresh_LP, fresh_tokens_LP, table_LP[anew], problem.cluster)
        new_LP[anew], tokens_LP[anew] = fresh_LP, fresh_tokens_LP
    if kept.size:
        part = problem.of_layers(kept) if anew.size else problem
        new_LP[kept], tokens_LP[kept] = incremental_tables(
            part, table_LP[kept], tokens_LP[kept], goal=goal, max_records=max_records
        )
    return new_LP, tokens_LP


def _node_by_node(
    problem: Problem, table_LP: IntArray, tokens_LP: FloatArray, settings: PlanSettings, max_records: int | None
) -> tuple[IntArray, FloatArray]:
    group_E, cluster = np.asarray(settings.constraints.group_of_expert), problem.cluster
    node_LG = domains.nodes_in_force(table_LP, group_E, cluster)
    strayed_L: BoolArray = np.any(node_LG < 0, axis=1)
    layer, expert, rank = problem.pins
    strayed_L[layer[node_LG[layer, group_E[expert]] != cluster.node_R[rank]]] = True
    strayed = np.flatnonzero(strayed_L)
    if strayed.size:
        part = problem.of_layers(strayed)
        node_LG[strayed] = domains.node_of_groups(part.load_LE, group_E, cluster, part.pins)
    new_LP, new_tokens_LP = table_LP.copy(), np.zeros(table_LP.shape)
    for domain in domains.split_by_node(node_LG, group_E, cluster):
        local_LP = domain.local_table(table_LP, problem.num_experts)
        start_LP = tokens_LP[:, domain.places]
        left = None if max_records is None else max_records - num_records(new_LP, table_LP)
        local_LP, new_tokens_LP[:, domain.places] = _solve(
            domain.problem(problem), local_LP, start_LP, strayed_L, goal=settings.goal, max_records=left
        )
        new_LP[:, domain.places] = domain.logical_table(local_LP)
    if max_records is not None and num_records(new_LP, table_LP) > max_records and not (table_LP < 0).all():
        raise PlacementError(
            f"budget_bytes must pay for the {num_records(new_LP, table_LP)} moves that bring the groups together, got "
            f"enough for {max_records}"
        )
    if not (table_LP < 0).all() and not fits(table_LP, new_LP, cluster, problem.max_incoming).all():
        raise PlacementError(
            f"max_incoming_per_layer_rank must be above {problem.max_incoming} to bring the groups together"
        )
    return new_LP, new_tokens_LP
