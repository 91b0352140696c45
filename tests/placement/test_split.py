"""Splits of tokens over replicas: the water-filling against linear programming, and what any split must keep."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT, expert_loads, loads_and_clusters
from moeserve.testing.placements import random_placement
from moeserve_placement import ExpertPlacement, PlacementError, PlanSettings, fresh_placement
from moeserve_placement.arrays import FloatArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.cost import balancedness, by_rank
from moeserve_placement.split import CLOSE, Effort, balanced_tokens, even_tokens, shares, tokens_in_force
from moeserve_placement.split_lp import best_split

EXACT = Effort(tolerance=1e-6, max_iterations=2000)


@st.composite
def maps(draw: st.DrawFn) -> tuple[ExpertPlacement, FloatArray]:
    """Random maps, not made for the loads: many ranks cannot be balanced at all."""
    num_ranks = draw(st.integers(1, 6))
    num_experts = draw(st.integers(num_ranks, 16))
    placement = random_placement(
        num_layers=2,
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_redundant_experts=draw(st.integers(0, min(12, num_experts * (num_ranks - 1)))),
        seed=draw(st.integers(0, 1000)),
    )
    return placement, draw(expert_loads(num_layers=2, num_experts=num_experts))


def _sums(placement: ExpertPlacement, tokens_LP: FloatArray) -> FloatArray:
    sums = np.zeros((placement.num_layers, placement.num_logical_experts))
    layer_LP = np.broadcast_to(np.arange(placement.num_layers)[:, None], tokens_LP.shape)
    np.add.at(sums, (layer_LP, placement.physical_to_logical_LP), tokens_LP)
    return sums


@PATIENT
@given(case=maps())
def test_every_split_pours_out_exactly_the_load(case: tuple[ExpertPlacement, FloatArray]) -> None:
    placement, load_LE = case
    table_LP = placement.physical_to_logical_LP
    for tokens_LP in (even_tokens(table_LP, load_LE), balanced_tokens(table_LP, load_LE, Cluster.of(placement))):
        assert (tokens_LP >= 0).all()
        np.testing.assert_allclose(_sums(placement, tokens_LP), load_LE, rtol=1e-9, atol=1e-9)
        split_LP = shares(table_LP, tokens_LP, load_LE)
        shared_LE = _sums(placement, split_LP)
        np.testing.assert_allclose(shared_LE * load_LE, load_LE, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(shared_LE, 1.0, rtol=1e-6)
        np.testing.assert_allclose(tokens_in_force(table_LP, load_LE, split_LP), tokens_LP, rtol=1e-9, atol=1e-9)


@settings(PATIENT, max_examples=60)
@given(case=maps(), capacities=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=6, max_size=6))
def test_water_filling_reaches_the_linear_program(
    case: tuple[ExpertPlacement, FloatArray], capacities: list[float]
) -> None:
    placement, load_LE = case
    even = Cluster.of(placement)
    cluster = Cluster(
        num_physical_by_rank=even.num_physical_by_rank,
        node_of_rank=even.node_of_rank,
        capacity_by_rank=tuple(capacities[: placement.num_ranks]),
    )
    tokens_LP = balanced_tokens(placement.physical_to_logical_LP, load_LE, cluster, effort=EXACT)
    highest_L = (by_rank(tokens_LP, cluster) / cluster.capacity_R).max(axis=1)
    for layer in range(placement.num_layers):
        _, optimum = best_split(placement.physical_to_logical_LP[layer], load_LE[layer], cluster)
        assert optimum * (1 - 1e-9) <= highest_L[layer] <= optimum * (1 + 1e-4) + 1e-9


@PATIENT
@given(case=maps())
def test_never_worse_than_even_or_than_where_it_started(case: tuple[ExpertPlacement, FloatArray]) -> None:
    placement, load_LE = case
    table_LP, cluster = placement.physical_to_logical_LP, Cluster.of(placement)
    start_LP = np.random.default_rng(0).random(table_LP.shape)
    start_LP *= (with_sums := load_LE / _sums(placement, start_LP))[np.arange(len(table_LP))[:, None], table_LP]
    assert with_sums.shape == load_LE.shape
    for start in (None, start_LP):
        tokens_LP = balanced_tokens(table_LP, load_LE, cluster, start_LP=start)
        from_LP = even_tokens(table_LP, load_LE) if start is None else start
        assert (
            by_rank(tokens_LP, cluster).max(axis=1) <= by_rank(from_LP, cluster).max(axis=1) * (1 + 1e-9) + 1e-9
        ).all()


def test_a_full_sized_map_is_split_as_well_as_can_be(dirichlet_loads: FloatArray) -> None:
    cluster = Cluster.uniform(num_ranks=32, num_physical_experts=288)
    placement, _ = fresh_placement(dirichlet_loads, cluster, PlanSettings())
    load_LE = dirichlet_loads * np.random.default_rng(1).uniform(0.7, 1.3, dirichlet_loads.shape)
    table_LP = placement.physical_to_logical_LP
    tokens_LP = balanced_tokens(table_LP, load_LE, cluster, effort=CLOSE)
    reached_L = balancedness(by_rank(tokens_LP, cluster), cluster)
    for layer in range(0, 58, 7):
        _, optimum = best_split(table_LP[layer], load_LE[layer], cluster)
        assert reached_L[layer] >= load_LE[layer].sum() / 32 / optimum - 1e-3


def test_offsets_move_tokens_away() -> None:
    # Two experts on both of two ranks; rank 0 is busy with 50 tokens of something else.
    table_LP, load_LE = np.array([[0, 1, 0, 1]]), np.array([[60.0, 40.0]])
    cluster = Cluster.uniform(num_ranks=2, num_physical_experts=4)
    offset_LR = np.array([[50.0, 0.0]])
    tokens_LP = balanced_tokens(table_LP, load_LE, cluster, offset_LR=offset_LR, effort=EXACT)
    np.testing.assert_allclose(by_rank(tokens_LP, cluster) + offset_LR, [[75.0, 75.0]], rtol=1e-3)


def test_empty_places_get_nothing() -> None:
    table_LP, load_LE = np.array([[0, -1, 0, 1]]), np.array([[60.0, 40.0]])
    cluster = Cluster.uniform(num_ranks=2, num_physical_experts=4)
    tokens_LP = balanced_tokens(table_LP, load_LE, cluster, effort=EXACT)
    assert tokens_LP[0, 1] == 0.0
    np.testing.assert_allclose(by_rank(tokens_LP, cluster), [[50.0, 50.0]], rtol=1e-3)


def test_a_split_of_another_shape_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"\(1, 4\), got \(1, 3\)"):
        tokens_in_force(np.array([[0, 1, 0, 1]]), np.ones((1, 2)), np.ones((1, 3)))


@PATIENT
@given(case=loads_and_clusters())
def test_without_replicas_there_is_nothing_to_split(case: tuple[FloatArray, Cluster]) -> None:
    load_LE, _ = case
    num_experts = load_LE.shape[1]
    cluster = Cluster.uniform(num_ranks=num_experts, num_physical_experts=num_experts)
    table_LP = np.tile(np.arange(num_experts), (len(load_LE), 1))
    assert (balanced_tokens(table_LP, load_LE, cluster) == load_LE).all()
