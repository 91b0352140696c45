"""Rules a plan keeps whatever the loads: pins, replicas on different nodes, groups on one node, room per layer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT, expert_loads
from moeserve.testing.placements import random_placement
from moeserve_placement import (
    Cluster,
    Constraints,
    ExpertPlacement,
    Pin,
    PlacementError,
    PlanSettings,
    fresh_placement,
    plan,
)
from moeserve_placement.arrays import FloatArray
from moeserve_placement.constraints import fair_share, replicas_on_nodes
from moeserve_placement.replicas import physical_by_layer

NUM_EXPERTS, NUM_RANKS = 16, 6
GROUPS = tuple(expert // 4 for expert in range(NUM_EXPERTS))


def _holds(placement: ExpertPlacement, layer: int, expert: int, rank: int) -> bool:
    return expert in placement.physical_to_logical_LP[layer, placement.rank_slice(rank)]


@st.composite
def pinned(draw: st.DrawFn) -> Constraints:
    """Up to six pins, a few on one rank or of one expert."""
    pin = st.builds(
        Pin,
        logical_expert_id=st.integers(0, NUM_EXPERTS - 1),
        rank=st.integers(0, NUM_RANKS - 1),
        layer=st.sampled_from([None, 0, 1]),
    )
    return Constraints(pins=tuple(draw(st.lists(pin, max_size=4))))


@PATIENT
@given(constraints=pinned(), load_LE=expert_loads(num_layers=2, num_experts=NUM_EXPERTS), seed=st.integers(0, 99))
def test_pinned_replicas_lie_where_they_must(constraints: Constraints, load_LE: FloatArray, seed: int) -> None:
    current = random_placement(
        num_layers=2, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=8, seed=seed
    )
    cluster = Cluster.of(current, num_nodes=2)
    with_pins = PlanSettings(constraints=constraints)
    fresh, _ = fresh_placement(load_LE, cluster, with_pins)
    for placement in (plan(load_LE, current, cluster, with_pins).placement, fresh):
        for pin in constraints.pins:
            for layer in range(2) if pin.layer is None else (pin.layer,):
                assert _holds(placement, layer, pin.logical_expert_id, pin.rank)


@PATIENT
@given(load_LE=expert_loads(num_layers=2, num_experts=NUM_EXPERTS), seed=st.integers(0, 99), drift=st.integers(0, 99))
def test_replicas_spread_over_nodes_and_stay_spread(load_LE: FloatArray, seed: int, drift: int) -> None:
    spread = PlanSettings(constraints=Constraints(spread_over_nodes=True))
    current = random_placement(
        num_layers=2, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=8, seed=seed
    )
    cluster = Cluster.of(current, num_nodes=3)
    fresh, split_LP = fresh_placement(load_LE, cluster, spread)
    drifted_LE = load_LE * np.random.default_rng(drift).uniform(0.3, 1.7, load_LE.shape)
    after_drift = plan(drifted_LE, fresh, cluster, spread, current_split_LP=split_LP).placement
    for placement in (fresh, after_drift, plan(load_LE, current, cluster, spread).placement):
        on_node_LEN = replicas_on_nodes(placement.physical_to_logical_LP, NUM_EXPERTS, cluster)[:, :NUM_EXPERTS]
        assert (on_node_LEN <= fair_share(on_node_LEN.sum(axis=2), 3)[..., None]).all()


@PATIENT
@given(load_LE=expert_loads(num_layers=3, num_experts=NUM_EXPERTS), seed=st.integers(0, 99))
def test_groups_keep_to_one_node(load_LE: FloatArray, seed: int) -> None:
    grouped = PlanSettings(constraints=Constraints(group_of_expert=GROUPS))
    current = random_placement(
        num_layers=3, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=8, seed=seed
    )
    cluster = Cluster.of(current, num_nodes=2)
    fresh, split_LP = fresh_placement(load_LE, cluster, grouped)
    drifted_LE = load_LE * np.random.default_rng(seed).uniform(0.5, 1.5, load_LE.shape)
    # From a map that mixes groups, and from one that does not.
    again = plan(drifted_LE, fresh, cluster, grouped, current_split_LP=split_LP)
    for placement in (fresh, again.placement, plan(load_LE, current, cluster, grouped).placement):
        on_node_LEN = replicas_on_nodes(placement.physical_to_logical_LP, NUM_EXPERTS, cluster)[:, :NUM_EXPERTS]
        by_group_LGN = on_node_LEN.reshape(3, 4, 4, 2).sum(axis=2)
        assert ((by_group_LGN > 0).sum(axis=2) == 1).all()


def test_groups_stay_on_their_nodes_when_loads_drift() -> None:
    grouped = PlanSettings(constraints=Constraints(group_of_expert=tuple(expert // 8 for expert in range(64))))
    load_LE = np.random.default_rng(0).exponential(100.0, (4, 64))
    cluster = Cluster.uniform(num_ranks=8, num_physical_experts=80, num_nodes=2)
    current, split_LP = fresh_placement(load_LE, cluster, grouped)
    drifted_LE = load_LE * np.random.default_rng(1).uniform(0.9, 1.1, load_LE.shape)
    result = plan(drifted_LE, current, cluster, grouped, current_split_LP=split_LP)
    assert len(result.moves) < 0.1 * current.physical_to_logical_LP.size
    assert result.balancedness_after_L.min() > 0.9


def test_a_pinned_expert_takes_its_group_along() -> None:
    constraints = Constraints(group_of_expert=GROUPS, pins=(Pin(logical_expert_id=5, rank=4),))
    load_LE = np.random.default_rng(0).exponential(100.0, (2, NUM_EXPERTS))
    cluster = Cluster.uniform(num_ranks=NUM_RANKS, num_physical_experts=24, num_nodes=2)
    placement, _ = fresh_placement(load_LE, cluster, PlanSettings(constraints=constraints))
    for layer in range(2):
        assert _holds(placement, layer, 5, 4)
        assert all(any(_holds(placement, layer, expert, rank) for rank in (3, 4, 5)) for expert in range(4, 8))


@pytest.mark.parametrize("num_physical", [(16, 24, 20), (18, 18, 24)])
def test_layers_keep_to_their_number_of_physical_experts(num_physical: tuple[int, ...]) -> None:
    limited = PlanSettings(num_physical_by_layer=num_physical)
    load_LE = np.random.default_rng(3).exponential(100.0, (3, NUM_EXPERTS))
    current = random_placement(num_layers=3, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=8)
    cluster = Cluster.of(current)
    fresh, split_LP = fresh_placement(load_LE, cluster, limited)
    assert ((fresh.physical_to_logical_LP >= 0).sum(axis=1) == num_physical).all()
    # No rank stores more than its part of the total, give or take one record.
    per_rank_R = np.bincount(
        np.broadcast_to(fresh.rank_of_physical_P, (3, 24))[fresh.physical_to_logical_LP >= 0], minlength=NUM_RANKS
    )
    assert per_rank_R.max() <= sum(num_physical) / NUM_RANKS + 1
    drifted_LE = load_LE * np.random.default_rng(1).uniform(0.5, 1.5, load_LE.shape)
    for placement in (
        plan(drifted_LE, fresh, cluster, limited, current_split_LP=split_LP).placement,
        plan(load_LE, current, cluster, limited).placement,
    ):
        assert ((placement.physical_to_logical_LP >= 0).sum(axis=1) <= num_physical).all()


@PATIENT
@given(load_LE=expert_loads(num_layers=4, num_experts=NUM_EXPERTS), num_redundant=st.integers(0, 32))
def test_redundant_experts_are_all_given_out(load_LE: FloatArray, num_redundant: int) -> None:
    cluster = Cluster.uniform(num_ranks=NUM_RANKS, num_physical_experts=24)
    num_physical_L = physical_by_layer(load_LE, cluster, num_redundant)
    assert num_physical_L.sum() == 4 * NUM_EXPERTS + num_redundant
    assert ((num_physical_L >= NUM_EXPERTS) & (num_physical_L <= 24)).all()
    fresh, _ = fresh_placement(load_LE, cluster, PlanSettings(num_physical_by_layer=tuple(num_physical_L.tolist())))
    assert ((fresh.physical_to_logical_LP >= 0).sum(axis=1) == num_physical_L).all()


def test_skewed_layers_get_the_redundant_experts() -> None:
    flat, skewed = np.full(NUM_EXPERTS, 10.0), np.full(NUM_EXPERTS, 1.0)
    skewed[:2] = 60.0
    cluster = Cluster.uniform(num_ranks=NUM_RANKS, num_physical_experts=24)
    # A rank's mean is 22 tokens in the skewed layer: the hot two need three replicas each, which takes four more.
    assert physical_by_layer(np.stack([flat, skewed, flat]), cluster, 4).tolist() == [16, 20, 16]


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (Constraints(pins=(Pin(logical_expert_id=16, rank=0),)), r"logical_expert_id must be in \[0, 16\), got 16"),
        (Constraints(pins=(Pin(logical_expert_id=0, rank=6),)), r"rank must be in \[0, 6\), got 6"),
        (Constraints(pins=(Pin(logical_expert_id=0, rank=0, layer=2),)), r"layer must be in \[0, 2\), got 2"),
        (
            Constraints(pins=tuple(Pin(logical_expert_id=expert, rank=1) for expert in range(5))),
            "layer 0: 5 experts are pinned to rank 1, which holds 4",
        ),
        (Constraints(group_of_expert=(0, 0, 1, 1)), "a group for each of 16 experts, got 4"),
        (Constraints(group_of_expert=(0,) * 13 + (1,) * 3), "no node has 13 places left for group 0"),
        (
            Constraints(
                group_of_expert=GROUPS, pins=(Pin(logical_expert_id=0, rank=0), Pin(logical_expert_id=1, rank=5))
            ),
            "group 0 are pinned to two nodes",
        ),
    ],
)
def test_rules_that_cannot_hold_are_refused(constraints: Constraints, words: str) -> None:
    cluster = Cluster.uniform(num_ranks=NUM_RANKS, num_physical_experts=24, num_nodes=2)
    with pytest.raises(PlacementError, match=words):
        fresh_placement(np.ones((2, NUM_EXPERTS)), cluster, PlanSettings(constraints=constraints))


def test_spread_and_groups_exclude_each_other() -> None:
    with pytest.raises(PlacementError, match="exclude each other"):
        Constraints(spread_over_nodes=True, group_of_expert=GROUPS)


def test_a_budget_below_what_the_rules_need_is_refused() -> None:
    current = ExpertPlacement.identity(num_layers=1, num_logical_experts=8, num_ranks=2, num_redundant_experts=2)
    constraints = Constraints(pins=(Pin(logical_expert_id=7, rank=0),))
    with pytest.raises(PlacementError, match="budget_bytes must pay for the 1 moves"):
        plan(np.ones((1, 8)), current, Cluster.of(current), PlanSettings(constraints=constraints, budget_bytes=0))
