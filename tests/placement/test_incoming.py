"""Plans of few changes a rank: within the limit whatever the loads and the rules, and as good after a few of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT, expert_loads
from moeserve.testing.placements import random_placement
from moeserve_placement import Cluster, Constraints, ExpertPlacement, Pin, PlacementError, PlanSettings, plan
from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.constraints import num_crowded
from moeserve_placement.incoming import staged

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 2, 16, 6
PINS = st.lists(
    st.builds(Pin, logical_expert_id=st.integers(0, NUM_EXPERTS - 1), rank=st.integers(0, NUM_RANKS - 1)), max_size=3
)


@st.composite
def limited_plans(draw: st.DrawFn) -> PlanSettings:
    """With some rules, or with a byte budget too."""
    constraints = Constraints(pins=tuple(draw(PINS)), spread_over_nodes=draw(st.booleans()))
    budgets = [None, 5, 1000] if constraints == Constraints() else [None]
    return PlanSettings(
        constraints=constraints,
        max_incoming_per_layer_rank=draw(st.integers(1, 3)),
        budget_bytes=draw(st.sampled_from(budgets)),
    )


def most_changes(current: ExpertPlacement, new: ExpertPlacement) -> int:
    """Of any rank in any layer."""
    changed_LP = new.physical_to_logical_LP != current.physical_to_logical_LP
    return max(int(changed_LP[:, new.rank_slice(rank)].sum(axis=1).max()) for rank in range(new.num_ranks))


@PATIENT
@given(
    load_LE=expert_loads(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS),
    limited=limited_plans(),
    seed=st.integers(0, 99),
)
def test_no_rank_takes_in_more_than_it_may_and_the_rules_hold_in_the_end(
    load_LE: FloatArray, limited: PlanSettings, seed: int
) -> None:
    current = random_placement(
        num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=8, seed=seed
    )
    cluster = Cluster.of(current, num_nodes=3)
    for _ in range(40):
        result = plan(load_LE, current, cluster, limited)
        # Construction has checked the map: every expert somewhere, none twice on a rank.
        assert most_changes(current, result.placement) <= limited.max_incoming_per_layer_rank
        if result.placement is current:
            break
        current = result.placement
    assert not len(result.moves)
    constraints = limited.constraints
    for pin in constraints.pins:
        held_Lp = current.physical_to_logical_LP[:, current.rank_slice(pin.rank)]
        assert (held_Lp == pin.logical_expert_id).any(axis=1).all()
    if constraints.spread_over_nodes and not constraints.pins:
        assert not num_crowded(current.physical_to_logical_LP, NUM_EXPERTS, cluster).any()


def test_several_small_plans_end_as_good_as_a_large_one(dirichlet_loads: FloatArray) -> None:
    """From experts in order, where nearly every rank has to change several places."""
    load_LE = dirichlet_loads[:8]
    start = ExpertPlacement.identity(num_layers=8, num_logical_experts=256, num_ranks=32, num_redundant_experts=32)
    cluster = Cluster.of(start)
    at_once = plan(load_LE, start, cluster, PlanSettings())
    assert most_changes(start, at_once.placement) > 1
    limited = PlanSettings(max_incoming_per_layer_rank=1)
    current, split_LP, reached = start, None, []
    for _ in range(6):
        result = plan(load_LE, current, cluster, limited, current_split_LP=split_LP)
        current, split_LP = result.placement, result.split_LP
        reached.append(result.balancedness_after_L)
    # The shares of a split sum to 1 but for the last digit.
    assert (np.diff([each.mean() for each in reached]) >= -1e-12).all()
    assert reached[-1].min() > at_once.balancedness_after_L.min() - 0.005


@st.composite
def tables(draw: st.DrawFn) -> tuple[IntArray, IntArray, Cluster]:
    """Two maps of the same shape that have nothing to do with each other."""
    num_ranks = draw(st.integers(1, 5))
    num_experts = draw(st.integers(num_ranks, 12))
    num_redundant = draw(st.integers(0, min(6, num_experts * (num_ranks - 1))))
    first, second = (
        random_placement(
            num_layers=2, num_experts=num_experts, num_ranks=num_ranks, num_redundant_experts=num_redundant, seed=seed
        )
        for seed in (draw(st.integers(0, 99)), draw(st.integers(100, 199)))
    )
    return first.physical_to_logical_LP, second.physical_to_logical_LP, Cluster.of(first)


@settings(PATIENT, max_examples=200)
@given(case=tables(), limit=st.integers(1, 4))
def test_what_is_cut_off_leaves_a_map(case: tuple[IntArray, IntArray, Cluster], limit: int) -> None:
    current_LP, new_LP, cluster = case
    try:
        staged_LP = staged(current_LP, new_LP, np.zeros(new_LP.shape, dtype=bool), cluster, limit)
    except PlacementError:
        # Nothing could be done but all at once.
        return
    placed = {
        "num_logical_experts": int(current_LP.max()) + 1,
        "num_ranks": cluster.num_ranks,
        "num_physical_by_rank": cluster.num_physical_by_rank,
    }
    before = ExpertPlacement(physical_to_logical_LP=current_LP, **placed)
    after = ExpertPlacement(physical_to_logical_LP=staged_LP, **placed)
    assert most_changes(before, after) <= limit


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        # Two swaps with rank 1, one of which fits.
        ([2, 3, 0, 1, 4, 5], [0, 3, 2, 1, 4, 5]),
        # A cycle that comes by rank 0 twice.
        ([2, 4, 1, 3, 0, 5], None),
    ],
)
def test_experts_that_can_only_change_places_all_at_once_are_named(new: list[int], expected: list[int] | None) -> None:
    cluster = Cluster.uniform(num_ranks=3, num_physical_experts=6)
    current_LP, new_LP, nothing_LP = np.arange(6)[None], np.array([new]), np.zeros((1, 6), dtype=bool)
    if expected is not None:
        assert staged(current_LP, new_LP, nothing_LP, cluster, 1).tolist() == [expected]
        return
    with pytest.raises(PlacementError, match="layer 0: max_incoming_per_layer_rank must be above 1"):
        staged(current_LP, new_LP, nothing_LP, cluster, 1)


def test_groups_that_cannot_come_together_one_by_one_are_refused() -> None:
    current = random_placement(num_layers=1, num_experts=16, num_ranks=4, num_redundant_experts=4)
    cluster = Cluster.of(current, num_nodes=2)
    grouped = Constraints(group_of_expert=tuple(expert // 4 for expert in range(16)))
    load_LE = np.random.default_rng(0).exponential(100.0, (1, 16))
    with pytest.raises(PlacementError, match="to bring the groups together"):
        plan(load_LE, current, cluster, PlanSettings(constraints=grouped, max_incoming_per_layer_rank=1))
