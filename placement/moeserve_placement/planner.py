"""The planner: from loads and the placement in force to the next placement, its split, and the moves between them.

Pure and without a clock: the same input gives the same plan. See docs/placement.md for the algorithm.

Axes: L MoE layers, E logical experts, P places (physical experts of the EP group), R ranks.
"""

from dataclasses import dataclass, replace

import numpy as np

from moeserve_placement import eplb
from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.bound import balancedness_bound
from moeserve_placement.cluster import Cluster
from moeserve_placement.cost import balancedness, by_rank
from moeserve_placement.moves import Moves, keep_in_place, moves_between
from moeserve_placement.objective import Objective
from moeserve_placement.placement import ExpertPlacement, PlacementError
from moeserve_placement.problem import Problem
from moeserve_placement.settings import PlanSettings, Policy
from moeserve_placement.split import CLOSE, even_tokens, shares, tokens_in_force
from moeserve_placement.tables import plan_tables, room_by_layer

PLACES_AT_ONCE = 96_000
"""Layers are planned together up to this many places: enough to make Python's own time small, and few enough that the
memory of one array serves the next, where larger ones would go back to the system each time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A decision with its reasons. Loads and balancedness are in the terms of the settings' cost model."""

    policy: Policy
    placement: ExpertPlacement
    """The target; the placement in force itself where nothing moves."""
    split_LP: FloatArray
    """Share of its logical expert's tokens that each place takes; sums to 1 over the replicas of an expert."""
    moves: Moves
    rank_load_before_LR: FloatArray
    """Cost of each rank, in tokens of the window, under the map and the split in force."""
    rank_load_resplit_LR: FloatArray
    """The same with the map in force and the best split: what can be had without moving a byte."""
    rank_load_after_LR: FloatArray
    balancedness_before_L: FloatArray
    balancedness_resplit_L: FloatArray
    balancedness_after_L: FloatArray
    bound_L: FloatArray
    """The balancedness in tokens that no map and split could exceed."""

    @property
    def num_bytes(self) -> int:
        return self.moves.num_bytes


def plan(
    load_LE: FloatArray,
    current: ExpertPlacement,
    cluster: Cluster,
    settings: PlanSettings,
    *,
    current_split_LP: FloatArray | None = None,
) -> Plan:
    """Plan from the placement in force.

    load_LE: routed tokens per layer and logical expert in the window, at least 0. current_split_LP: the split in
    force; None: replicas share evenly. Raises PlacementError where loads, placement, cluster and constraints do not
    fit one another.
    """
    load_LE = _checked_load(load_LE, current.num_layers, current.num_logical_experts)
    check_cluster(current, cluster, settings)
    objective = Objective.of(cluster, settings)
    table_LP = current.physical_to_logical_LP
    before_LP = tokens_in_force(table_LP, load_LE, current_split_LP)
    if settings.policy == "frozen":
        resplit_LP, target_LP, after_LP = before_LP, table_LP, before_LP
    elif settings.policy == "incremental":
        resplit_LP, target_LP, after_LP = _incremental(load_LE, table_LP, before_LP, objective, settings)
    else:
        resplit_LP, target_LP = before_LP, _eplb(load_LE, table_LP, cluster, settings)
        after_LP = even_tokens(target_LP, load_LE)
    before_LR, resplit_LR, after_LR = (
        by_rank(settings.cost.of_places(tokens_LP), cluster) for tokens_LP in (before_LP, resplit_LP, after_LP)
    )
    placement = current
    if (target_LP != table_LP).any():
        placement = replace(current, physical_to_logical_LP=target_LP, epoch=current.epoch + 1)
    gain_L = (resplit_LR / cluster.capacity_R).max(axis=1) - (after_LR / cluster.capacity_R).max(axis=1)
    return Plan(
        policy=settings.policy,
        placement=placement,
        split_LP=shares(target_LP, after_LP, load_LE),
        moves=moves_between(current, placement, cluster, gain_L=gain_L, expert_bytes=settings.expert_bytes),
        rank_load_before_LR=before_LR,
        rank_load_resplit_LR=resplit_LR,
        rank_load_after_LR=after_LR,
        balancedness_before_L=balancedness(before_LR, cluster),
        balancedness_resplit_L=balancedness(resplit_LR, cluster),
        balancedness_after_L=balancedness(after_LR, cluster),
        bound_L=balancedness_bound(load_LE, cluster, _num_physical(settings, current.num_layers, cluster)),
    )


def fresh_placement(
    load_LE: FloatArray, cluster: Cluster, settings: PlanSettings, *, epoch: int = 0
) -> tuple[ExpertPlacement, FloatArray]:
    """The best placement for these loads with none in force, and its split [L, P]; the policy does not matter.

    Raises PlacementError where experts and constraints do not fit the cluster.
    """
    load_LE = _checked_load(load_LE, *load_LE.shape)
    num_layers, num_experts = load_LE.shape
    settings.constraints.check(num_layers=num_layers, num_experts=num_experts, cluster=cluster)
    nowhere_LP = np.full((num_layers, cluster.num_physical_experts), -1)
    nothing_LP = np.zeros(nowhere_LP.shape)
    _, table_LP, tokens_LP = _incremental(load_LE, nowhere_LP, nothing_LP, Objective.of(cluster, settings), settings)
    placement = ExpertPlacement(
        physical_to_logical_LP=table_LP,
        num_logical_experts=num_experts,
        num_ranks=cluster.num_ranks,
        epoch=epoch,
        num_physical_by_rank=cluster.num_physical_by_rank,
    )
    return placement, shares(table_LP, tokens_LP, load_LE)


def _incremental(
    load_LE: FloatArray, table_LP: IntArray, before_LP: FloatArray, objective: Objective, settings: PlanSettings
) -> tuple[FloatArray, IntArray, FloatArray]:
    """Tokens of the map in force under the best split, the next map, and its tokens."""
    num_layers, num_places = table_LP.shape
    pins = settings.constraints.pin_arrays(num_layers)
    whole = Problem(
        load_LE=load_LE,
        present_LE=np.ones(load_LE.shape, dtype=bool),
        room_LR=room_by_layer(objective.cluster, _num_physical(settings, num_layers, objective.cluster)),
        pin_layer_M=pins[0],
        pin_expert_M=pins[1],
        pin_rank_M=pins[2],
        objective=objective,
        max_incoming=settings.max_incoming_per_layer_rank,
    )
    # A byte budget is shared out over all layers, so they have to be seen together.
    at_once = num_layers if settings.budget_bytes is not None else max(1, PLACES_AT_ONCE // num_places)
    resplit_LP, target_LP, after_LP = np.empty(table_LP.shape), np.empty_like(table_LP), np.empty(table_LP.shape)
    for start in range(0, num_layers, at_once):
        rows = slice(start, start + at_once)
        resplit_LP[rows], target_LP[rows], after_LP[rows] = _plan_together(
            whole.of_layers(np.arange(num_layers)[rows]), table_LP[rows], before_LP[rows], settings
        )
    return resplit_LP, target_LP, after_LP


def _plan_together(
    problem: Problem, table_LP: IntArray, before_LP: FloatArray, settings: PlanSettings
) -> tuple[FloatArray, IntArray, FloatArray]:
    objective, load_LE = problem.objective, problem.load_LE
    resplit_LP = objective.tokens(table_LP, load_LE, before_LP, effort=CLOSE)
    if objective.weighted_split:
        # A split is solved for tokens; where reading weights costs too, the one in force may be better.
        resplit_LP = objective.lower(resplit_LP, before_LP)
    target_LP, searched_LP = plan_tables(problem, table_LP, resplit_LP, settings)
    after_LP = resplit_LP.copy()
    changed = (target_LP != table_LP).any(axis=1)
    if changed.any():
        closer_LP = objective.tokens(target_LP[changed], load_LE[changed], searched_LP[changed], effort=CLOSE)
        after_LP[changed] = objective.lower(closer_LP, searched_LP[changed])
    return resplit_LP, target_LP, after_LP


def _eplb(load_LE: FloatArray, table_LP: IntArray, cluster: Cluster, settings: PlanSettings) -> IntArray:
    groups = settings.constraints.group_of_expert
    hierarchical = settings.policy == "eplb-hierarchical"
    target_LP = eplb.eplb_hierarchical(
        load_LE,
        num_physical=cluster.num_physical_experts,
        num_ranks=cluster.num_ranks,
        num_nodes=cluster.num_nodes if hierarchical else 1,
        num_groups=1 if not hierarchical else cluster.num_nodes if groups is None else max(groups) + 1,
    )
    target_LP = eplb.part_twins(target_LP, load_LE, cluster)
    return keep_in_place(target_LP, even_tokens(target_LP, load_LE), table_LP, cluster)[0]


def _num_physical(settings: PlanSettings, num_layers: int, cluster: Cluster) -> IntArray:
    if settings.num_physical_by_layer is None:
        return np.full(num_layers, cluster.num_physical_experts)
    if len(settings.num_physical_by_layer) != num_layers:
        raise PlacementError(
            f"num_physical_by_layer must name {num_layers} layers, got {len(settings.num_physical_by_layer)}"
        )
    return np.asarray(settings.num_physical_by_layer, dtype=np.int64)


def _checked_load(load_LE: FloatArray, num_layers: int, num_experts: int) -> FloatArray:
    if load_LE.shape != (num_layers, num_experts):
        raise PlacementError(f"loads must be {num_layers} layers x {num_experts} experts, got {load_LE.shape}")
    if not np.isfinite(load_LE).all() or (load_LE < 0).any():
        raise PlacementError("loads must be finite and at least 0")
    return np.asarray(load_LE, dtype=np.float64)


def check_cluster(current: ExpertPlacement, cluster: Cluster, settings: PlanSettings) -> None:
    """Raise PlacementError where placement, cluster and constraints do not fit one another."""
    if tuple(current.num_physical_R.tolist()) != cluster.num_physical_by_rank:
        raise PlacementError(
            f"the cluster's ranks hold {list(cluster.num_physical_by_rank)} physical experts, the placement's "
            f"{current.num_physical_R.tolist()}"
        )
    settings.constraints.check(num_layers=current.num_layers, num_experts=current.num_logical_experts, cluster=cluster)
