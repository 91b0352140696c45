"""Plans: valid whatever the loads, at the optimum at tiny sizes, never worse than EPLB, and few moves after drift."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT, expert_loads, loads_and_clusters
from moeserve.testing.placements import random_placement
from moeserve_placement import (
    POLICIES,
    Cluster,
    CostModel,
    ExpertPlacement,
    PlacementError,
    PlanSettings,
    fresh_placement,
    plan,
)
from moeserve_placement.arrays import FloatArray
from moeserve_placement.bound import lowest_level
from moeserve_placement.cost import balancedness, by_rank
from moeserve_placement.eplb import eplb_global
from moeserve_placement.split import even_tokens, tokens_in_force
from moeserve_placement.split_lp import best_split


def _highest(placement: ExpertPlacement, split_LP: FloatArray, load_LE: FloatArray, cluster: Cluster) -> FloatArray:
    tokens_LP = tokens_in_force(placement.physical_to_logical_LP, load_LE, split_LP)
    highest: FloatArray = (by_rank(tokens_LP, cluster) / cluster.capacity_R).max(axis=1)
    return highest


@PATIENT
@given(case=loads_and_clusters(), weighted=st.booleans())
def test_fresh_placements_are_valid_and_not_above_what_is_possible(
    case: tuple[FloatArray, Cluster], weighted: bool
) -> None:
    load_LE, cluster = case
    # Construction checks it: every expert somewhere, none twice on a rank.
    placement, split_LP = fresh_placement(load_LE, cluster, PlanSettings(split="weighted" if weighted else "even"))
    assert (placement.physical_to_logical_LP >= 0).all()
    assert (_highest(placement, split_LP, load_LE, cluster) >= lowest_level(load_LE, cluster) * (1 - 1e-9)).all()


@settings(PATIENT, max_examples=25)
@given(data=st.data(), num_experts=st.integers(2, 4))
def test_at_tiny_sizes_no_placement_is_better(data: st.DataObject, num_experts: int) -> None:
    num_ranks = data.draw(st.integers(2, 3))
    size = data.draw(st.integers(-(-num_experts // num_ranks), min(num_experts, 3)))
    assume(size * num_ranks >= num_experts)
    load_LE = data.draw(expert_loads(num_layers=1, num_experts=num_experts))
    cluster = Cluster.uniform(num_ranks=num_ranks, num_physical_experts=size * num_ranks)
    choices = list(itertools.combinations(range(num_experts), size))
    # Ranks are alike: their order does not matter.
    optimum = min(
        best_split(np.array(ranks).ravel(), load_LE[0], cluster)[1]
        for ranks in itertools.combinations_with_replacement(choices, num_ranks)
        if len(set(itertools.chain(*ranks))) == num_experts
    )
    placement, split_LP = fresh_placement(load_LE, cluster, PlanSettings())
    assert _highest(placement, split_LP, load_LE, cluster)[0] <= optimum * 1.005 + 1e-9


@settings(PATIENT, max_examples=150)
@given(case=loads_and_clusters(max_experts=40, max_ranks=8, equal=True))
def test_never_worse_than_eplb_with_as_many_places(case: tuple[FloatArray, Cluster]) -> None:
    load_LE, cluster = case
    table_LP = eplb_global(load_LE, num_physical=cluster.num_physical_experts, num_ranks=cluster.num_ranks)
    eplb_L = by_rank(even_tokens(table_LP, load_LE), cluster).max(axis=1)
    placement, split_LP = fresh_placement(load_LE, cluster, PlanSettings())
    ours_L = _highest(placement, split_LP, load_LE, cluster)
    # Layers that are within 0.3 % of the best possible are not searched any further.
    assert (ours_L <= np.maximum(eplb_L * (1 + 1e-9), lowest_level(load_LE, cluster) / 0.997 + 1e-9)).all()


@PATIENT
@given(case=loads_and_clusters(), policy=st.sampled_from(["incremental", "frozen"]), seed=st.integers(0, 99))
def test_no_layer_gets_worse(case: tuple[FloatArray, Cluster], policy: str, seed: int) -> None:
    load_LE, cluster = case
    settings_ = PlanSettings(policy=policy)
    current, split_LP = fresh_placement(load_LE, cluster, settings_)
    drifted_LE = load_LE * np.random.default_rng(seed).uniform(0.3, 1.7, load_LE.shape)
    result = plan(drifted_LE, current, cluster, settings_, current_split_LP=split_LP)
    before_L = (result.rank_load_before_LR / cluster.capacity_R).max(axis=1)
    after_L = _highest(result.placement, result.split_LP, drifted_LE, cluster)
    assert (after_L <= before_L * (1 + 1e-9) + 1e-9).all()
    np.testing.assert_allclose(after_L, (result.rank_load_after_LR / cluster.capacity_R).max(axis=1), atol=1e-9)
    assert (result.balancedness_after_L <= result.bound_L + 1e-9).all()
    if policy == "frozen":
        assert not len(result.moves)
        assert result.placement is current


@PATIENT
@given(case=loads_and_clusters(), goal=st.floats(0.5, 1.0))
def test_layers_at_their_goal_are_left_alone(case: tuple[FloatArray, Cluster], goal: float) -> None:
    load_LE, cluster = case
    current, split_LP = fresh_placement(load_LE, cluster, PlanSettings())
    drifted_LE = load_LE * np.random.default_rng(1).uniform(0.5, 1.5, load_LE.shape)
    result = plan(drifted_LE, current, cluster, PlanSettings(goal=goal), current_split_LP=split_LP)
    moved_L = (result.placement.physical_to_logical_LP != current.physical_to_logical_LP).any(axis=1)
    assert not (moved_L & (result.balancedness_resplit_L > goal * result.bound_L * (1 + 1e-9))).any()


@pytest.mark.parametrize(("noise", "most_moved"), [(0.1, 0.08), (0.3, 0.13)])
def test_drift_costs_few_moves(dirichlet_loads: FloatArray, noise: float, most_moved: float) -> None:
    cluster = Cluster.uniform(num_ranks=32, num_physical_experts=288)
    current, split_LP = fresh_placement(dirichlet_loads, cluster, PlanSettings())
    load_LE = dirichlet_loads * np.random.default_rng(3).uniform(1 - noise, 1 + noise, dirichlet_loads.shape)
    result = plan(load_LE, current, cluster, PlanSettings(), current_split_LP=split_LP)
    assert result.balancedness_after_L.min() >= 0.99
    assert len(result.moves) <= most_moved * current.physical_to_logical_LP.size
    forgetful = plan(load_LE, current, cluster, PlanSettings(policy="eplb-global"))
    assert len(forgetful.moves) > 0.9 * current.physical_to_logical_LP.size
    assert forgetful.balancedness_after_L.mean() < result.balancedness_after_L.mean()


def test_an_arbitrary_map_is_repaired_without_starting_over(dirichlet_loads: FloatArray) -> None:
    load_LE = dirichlet_loads[:8]
    current = random_placement(num_layers=8, num_experts=256, num_ranks=32, num_redundant_experts=32)
    result = plan(load_LE, current, Cluster.of(current), PlanSettings())
    assert result.balancedness_before_L.max() < 0.7
    assert result.balancedness_after_L.min() >= 0.99
    assert len(result.moves) < 0.35 * current.physical_to_logical_LP.size


def test_an_even_split_is_planned_for_too(dirichlet_loads: FloatArray) -> None:
    load_LE = dirichlet_loads[:8]
    cluster = Cluster.uniform(num_ranks=32, num_physical_experts=288)
    even = PlanSettings(split="even", goal=0.99)
    current, split_LP = fresh_placement(load_LE, cluster, even)
    np.testing.assert_allclose(
        split_LP, 1.0 / np.take_along_axis(current.num_replicas_LE, current.physical_to_logical_LP, 1)
    )
    drifted_LE = load_LE * np.random.default_rng(5).uniform(0.9, 1.1, load_LE.shape)
    result = plan(drifted_LE, current, cluster, even)
    assert result.balancedness_after_L.min() >= 0.98
    assert len(result.moves) < 0.12 * current.physical_to_logical_LP.size


@PATIENT
@given(budget=st.integers(0, 60))
def test_a_byte_budget_holds_and_is_spent_where_it_pays(budget: int) -> None:
    rng = np.random.default_rng(0)
    load_LE = rng.dirichlet(np.ones(64), 6) * 1e5
    current = random_placement(num_layers=6, num_experts=64, num_ranks=8, num_redundant_experts=8)
    cluster = Cluster.of(current)
    limited = PlanSettings(expert_bytes=10, budget_bytes=10 * budget + 9)
    result = plan(load_LE, current, cluster, limited)
    assert result.num_bytes <= 10 * budget
    if budget >= 12:
        assert (result.rank_load_after_LR.max(axis=1) < result.rank_load_resplit_LR.max(axis=1)).any()


@settings(PATIENT, max_examples=40)
@given(case=loads_and_clusters(), activation=st.floats(0.1, 200), num_steps=st.integers(1, 100))
def test_reading_weights_counts_where_it_costs(
    case: tuple[FloatArray, Cluster], activation: float, num_steps: int
) -> None:
    load_LE, cluster = case
    cost = CostModel(activation_tokens=activation, num_steps=num_steps)
    current, split_LP = fresh_placement(load_LE, cluster, PlanSettings(cost=cost))
    drifted_LE = load_LE * np.random.default_rng(0).uniform(0.5, 1.5, load_LE.shape)
    result = plan(drifted_LE, current, cluster, PlanSettings(cost=cost), current_split_LP=split_LP)
    tokens_LP = tokens_in_force(result.placement.physical_to_logical_LP, drifted_LE, result.split_LP)
    expected_LR = by_rank(tokens_LP + activation * num_steps * (1 - np.exp(-tokens_LP / num_steps)), cluster)
    np.testing.assert_allclose(result.rank_load_after_LR, expected_LR, rtol=1e-9, atol=1e-6)
    highest_before = (result.rank_load_before_LR / cluster.capacity_R).max(axis=1)
    highest_after = (result.rank_load_after_LR / cluster.capacity_R).max(axis=1)
    assert (highest_after <= highest_before * (1 + 1e-9) + 1e-9).all()


def test_cold_experts_are_spread_when_reading_them_is_dear() -> None:
    # Tokens alone: four hot experts on rank 0 and 60 idle ones on rank 1 would do. Reading weights, it would not.
    load_LE = np.concatenate([np.full((1, 4), 60.0), np.full((1, 60), 4.0)], axis=1)
    cluster = Cluster.uniform(num_ranks=2, num_physical_experts=64)
    dear = CostModel(activation_tokens=50.0, num_steps=100.0)
    placement, split_LP = fresh_placement(load_LE, cluster, PlanSettings(cost=dear))
    tokens_LP = tokens_in_force(placement.physical_to_logical_LP, load_LE, split_LP)
    assert balancedness(by_rank(dear.of_places(tokens_LP), cluster), cluster)[0] > 0.995


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_a_valid_plan_and_the_same_one_again(policy: str) -> None:
    load_LE = np.random.default_rng(2).exponential(100.0, (4, 32)) ** 2
    current = ExpertPlacement.identity(num_layers=4, num_logical_experts=32, num_ranks=8, num_redundant_experts=16)
    cluster = Cluster.of(current, num_nodes=2)
    first, second = (plan(load_LE, current, cluster, PlanSettings(policy=policy)) for _ in range(2))
    assert (first.placement.physical_to_logical_LP == second.placement.physical_to_logical_LP).all()
    assert (first.split_LP == second.split_LP).all()
    assert first.placement.epoch == (0 if policy == "frozen" else 1)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (np.ones((2, 8)), r"loads must be 1 layers x 8 experts, got \(2, 8\)"),
        (np.full((1, 8), np.nan), "finite"),
        (-np.ones((1, 8)), "at least 0"),
    ],
)
def test_loads_that_cannot_be_are_refused(load: FloatArray, words: str) -> None:
    current = ExpertPlacement.identity(num_layers=1, num_logical_experts=8, num_ranks=2)
    with pytest.raises(PlacementError, match=words):
        plan(load, current, Cluster.of(current), PlanSettings())


def test_another_cluster_is_refused() -> None:
    current = ExpertPlacement.identity(num_layers=1, num_logical_experts=8, num_ranks=2)
    with pytest.raises(PlacementError, match=r"\[5, 5\].*\[4, 4\]"):
        plan(np.ones((1, 8)), current, Cluster.uniform(num_ranks=2, num_physical_experts=10), PlanSettings())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "greedy"}, "policy must be one of incremental"),
        ({"split": "random"}, "split must be one of weighted, even"),
        ({"goal": 0.0}, r"goal must be in \(0, 1\]"),
        ({"expert_bytes": 0}, "expert_bytes must be at least 1"),
        ({"max_incoming_per_layer_rank": 0}, "max_incoming_per_layer_rank must be at least 1 or None, got 0"),
        ({"budget_bytes": -1}, "budget_bytes at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PlanSettings(**changes)
