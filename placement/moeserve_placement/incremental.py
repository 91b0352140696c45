"""Maps from the map in force: what the rules demand, then few moves for the layers that need any.

Axes: L layers, E logical experts, P places.
"""

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.enforce import fit_room, put_pins, spread
from moeserve_placement.fresh import fresh_tables
from moeserve_placement.improve import improve
from moeserve_placement.incoming import fits, staged
from moeserve_placement.moves import keep_in_place, relabel_ranks
from moeserve_placement.placement import PlacementError
from moeserve_placement.problem import Problem

REPACK_GAIN = 0.02
"""A layer that local search leaves this share above its target is packed anew, if that brings it down by as much."""


def incremental_tables(
    problem: Problem, table_LP: IntArray, start_LP: FloatArray, *, goal: float, max_records: int | None
) -> tuple[IntArray, FloatArray]:
    """Table and tokens [L, P] after the moves.

    start_LP: tokens on the map in force under the best split. goal: share of the bound a layer must reach to be left
    alone. max_records: moves in all layers together. Raises PlacementError where the rules alone need more.
    """
    ruled_LP, tokens_LP = _ruled(problem, table_LP, start_LP)
    records_left = np.iinfo(np.int64).max if max_records is None else max_records - num_records(ruled_LP, table_LP)
    if records_left < 0:
        raise PlacementError(
            f"budget_bytes must pay for the {num_records(ruled_LP, table_LP)} moves that the constraints need, "
            f"got enough for {max_records}"
        )
    target_L = problem.target_L(tokens_LP, goal)
    new_LP, tokens_LP = improve(
        ruled_LP,
        problem.load_LE,
        tokens_LP,
        problem.objective,
        fixed_LP=problem.fixed_LP(ruled_LP),
        target_L=target_L,
        max_records=records_left,
        in_force_LP=table_LP,
        max_incoming=problem.max_incoming,
    )
    records_left -= num_records(new_LP, ruled_LP)
    level_L = problem.objective.level_LR(tokens_LP).max(axis=1)
    stuck = np.flatnonzero(level_L > target_L * (1.0 + REPACK_GAIN))
    if stuck.size and records_left > 0:
        _repack(problem, stuck, (table_LP, new_LP, tokens_LP), records_left)
    return new_LP, tokens_LP


def _ruled(problem: Problem, table_LP: IntArray, start_LP: FloatArray) -> tuple[IntArray, FloatArray]:
    """The map with room, pins and spread kept as far as the limits allow, and its tokens under the best split."""
    cluster = problem.cluster
    ruled_LP = fit_room(table_LP, start_LP, problem.room_LR, cluster)
    ruled_LP, fixed_LP = put_pins(ruled_LP, start_LP, problem.pins, problem.num_experts, cluster)
    if problem.objective.spread_over_nodes:
        ruled_LP = spread(ruled_LP, start_LP, fixed_LP, problem.num_experts, cluster)
    if problem.max_incoming is not None:
        ruled_LP = staged(table_LP, ruled_LP, problem.fixed_LP(ruled_LP), cluster, problem.max_incoming)
    tokens_LP = start_LP.copy()
    changed = np.flatnonzero((ruled_LP != table_LP).any(axis=1))
    if changed.size:
        tokens_LP[changed] = problem.objective.tokens(ruled_LP[changed], problem.load_LE[changed])
    return ruled_LP, tokens_LP


def _repack(problem: Problem, rows: IntArray, result: tuple[IntArray, IntArray, FloatArray], records_left: int) -> None:
    """Pack these layers anew, and put into the result those that come down enough and keep to the limits."""
    table_LP, new_LP, tokens_LP = result
    part = problem.of_layers(rows)
    fresh_LP, fresh_tokens_LP = fresh_tables(part)
    if not part.pin_layer_M.size:
        fresh_LP, fresh_tokens_LP = relabel_ranks(
            fresh_LP, fresh_tokens_LP, table_LP[rows], problem.cluster, problem.num_experts
        )
    fresh_LP, fresh_tokens_LP = keep_in_place(fresh_LP, fresh_tokens_LP, table_LP[rows], problem.cluster)
    fits_L = fits(table_LP[rows], fresh_LP, problem.cluster, problem.max_incoming)
    old_L = problem.objective.level_LR(tokens_LP[rows]).max(axis=1)
    new_L = problem.objective.level_LR(fresh_tokens_LP).max(axis=1)
    for index in np.argsort(new_L - old_L, kind="stable"):
        row = rows[index]
        # The moves that local search had already made in the layer are taken back.
        num_more = num_records(fresh_LP[index], table_LP[row]) - num_records(new_LP[row], table_LP[row])
        gains = new_L[index] < old_L[index] * (1.0 - REPACK_GAIN)
        if gains and fits_L[index] and num_more <= records_left:
            records_left -= num_more
            new_LP[row], tokens_LP[row] = fresh_LP[index], fresh_tokens_LP[index]


def num_records(new: IntArray, old: IntArray) -> int:
    """Expert records that have to move from one table to another."""
    return int(((new != old) & (new >= 0)).sum())
