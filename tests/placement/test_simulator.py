"""Replays: what each policy serves a window with, when a map takes force, and what is counted."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moeserve_placement import Cluster, ExpertPlacement, PlacementError, PlanSettings, plan
from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller import ControllerSettings
from moeserve_placement.load import LoadError, LoadTrace, LoadWindow
from moeserve_placement.scenario import Scenario
from moeserve_placement.simulator import Simulation, comparison, intervals_of, simulate
from moeserve_placement.split import even_tokens
from moeserve_placement.synthetic import (
    dirichlet_popularity,
    domain_popularity,
    drifting_trace,
    switching_trace,
)

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 3, 32, 4
POPULARITY_LE = dirichlet_popularity(
    np.random.default_rng(0), num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, concentration=1.0
)


def _trace(num_windows: int = 40, **changes: float) -> LoadTrace:
    given = {"tokens_per_window": 4000, "top_k": 4, "drift": 0.03, "seed": 1} | changes
    return drifting_trace(POPULARITY_LE, num_windows=num_windows, **given)


def _scenario(**changes: object) -> Scenario:
    scenario = Scenario.in_order(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS)
    return replace(scenario, plan_settings=PlanSettings(expert_bytes=2**20), **changes)


def _highest(placement: ExpertPlacement, load_LE: FloatArray) -> FloatArray:
    """Tokens of the most loaded rank, replicas sharing evenly."""
    tokens_LP = even_tokens(placement.physical_to_logical_LP, load_LE)
    by_rank_LR = np.stack([tokens_LP[:, placement.rank_slice(rank)].sum(axis=1) for rank in range(NUM_RANKS)], axis=1)
    highest: FloatArray = by_rank_LR.max(axis=1)
    return highest


def test_a_frozen_placement_serves_every_window_as_it_is() -> None:
    trace, scenario = _trace(), _scenario()
    simulation = simulate(trace, scenario.with_policy("frozen"))
    expected_WL = np.stack([_highest(scenario.start, window.expert_load_LE) for window in trace.windows[1:]])
    np.testing.assert_allclose(simulation.highest_WL, expected_WL)
    np.testing.assert_allclose(simulation.mean_WL, 4000 * 4 / NUM_RANKS)
    assert simulation.time_W.tolist() == [window.end_s for window in trace.windows[1:]]
    assert not simulation.moves_W.any()
    waited = 1 - simulation.mean_WL.sum() / expected_WL.sum()
    assert simulation.summary()["imbalance_share"] == pytest.approx(waited)


def test_each_window_is_served_with_the_plan_from_the_windows_before_it() -> None:
    trace = _trace(6)
    # One window to plan on, planned after every one, copies that take no time to speak of.
    instant = ControllerSettings(num_windows=1, copy_bytes_per_s=1e30)
    scenario = _scenario(controller=instant, replan_windows=1).with_policy("eplb-global")
    simulation = simulate(trace, scenario)
    current, moves = scenario.start, []
    for last, window, highest_L in zip(trace.windows, trace.windows[1:], simulation.highest_WL, strict=False):
        result = plan(last.expert_load_LE, current, scenario.cluster, scenario.plan_settings)
        current = result.placement
        moves.append(len(result.moves))
        np.testing.assert_allclose(highest_L, _highest(current, window.expert_load_LE))
    assert simulation.moves_W.tolist() == moves
    assert simulation.summary()["num_bytes"] == sum(moves) * 2**20


def test_a_map_serves_when_its_copies_are_done_and_not_before() -> None:
    trace = _trace(20)
    one_move_s = 100.0
    slow = ControllerSettings(num_windows=1, copy_bytes_per_s=2**20 / one_move_s)
    scenario = _scenario(controller=slow, replan_windows=1).with_policy("eplb-global")
    simulation = simulate(trace, scenario)
    frozen = simulate(trace, scenario.with_policy("frozen"))
    # Copies take longer than the windows that are left.
    assert simulation.copy_s > trace.windows[-1].end_s
    assert np.count_nonzero(simulation.moves_W) == 1
    np.testing.assert_allclose(simulation.highest_WL, frozen.highest_WL)


def test_the_controller_beats_a_frozen_map_with_a_fraction_of_the_bytes_of_eplb() -> None:
    trace, scenario = _trace(80), _scenario()
    frozen, ours, eplb = (
        simulate(trace, scenario.with_policy(policy)) for policy in ("frozen", "incremental", "eplb-global")
    )
    assert ours.imbalance_share < 0.5 * frozen.imbalance_share
    assert 0 < ours.moves_W.sum() < 0.2 * eplb.moves_W.sum()
    assert ours.lost_s < eplb.lost_s
    assert ours.num_migrations >= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_gain_that_does_not_last_is_counted_as_a_rollback(seed: int) -> None:
    """As soon as the first load is answered, it turns into one that the map of the start serves as well as can be."""
    scenario = _scenario()
    row_P = scenario.start.physical_to_logical_LP[0]
    other_E = np.zeros(NUM_EXPERTS)
    for rank in range(NUM_RANKS):
        held = row_P[scenario.start.rank_slice(rank)]
        alone = held[scenario.start.num_replicas_LE[0, held] == 1]
        other_E[alone] = 1 / alone.size
    trace = switching_trace(
        np.stack([POPULARITY_LE, np.tile(other_E, (NUM_LAYERS, 1))]),
        num_windows=16,
        windows_per_domain=8,
        tokens_per_window=20_000,
        top_k=4,
        seed=seed,
    )
    simulation = simulate(trace, scenario)
    assert (simulation.num_migrations, simulation.num_rollbacks) == (1, 1)
    assert simulation.moves_W.sum() == 2 * simulation.moves_W[np.flatnonzero(simulation.moves_W)[0]]


def test_at_the_floor_is_what_chance_explains() -> None:
    flat_LE = np.full((2, 16), 1 / 16)
    trace = drifting_trace(flat_LE, num_windows=30, tokens_per_window=1000, top_k=2, drift=0.0, seed=0)
    scenario = Scenario.in_order(num_layers=2, num_experts=16, num_ranks=4, places_per_rank=4)
    simulation = simulate(trace, scenario)
    assert simulation.summary()["at_floor_share"] == 1.0
    assert simulation.balancedness_WL.max() < 1.0
    assert not simulation.moves_W.any()


def test_figures_are_plain_and_the_table_has_a_row_for_each() -> None:
    simulations = [simulate(_trace(4), _scenario().with_policy(policy)) for policy in ("frozen", "eplb-hierarchical")]
    records = json.loads(json.dumps([each.to_dict() for each in simulations]))
    assert [record["policy"] for record in records] == ["frozen", "eplb-hierarchical"]
    assert len(records[0]["balancedness"]) == len(records[0]["time_s"]) == 3
    rows = comparison(simulations).splitlines()
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1


def test_windows_of_one_time_are_served_together() -> None:
    load_LE = np.ones((1, 4))
    windows = tuple(
        LoadWindow(expert_load_LE=load_LE, start_s=start, end_s=start + 2.0, num_tokens=4, num_steps=steps, phase=phase)
        for start in (0.0, 2.0)
        for phase, steps in (("decode", 9), ("prefill", 3))
    )
    first, second = intervals_of(LoadTrace(model="m", top_k=1, moe_layer_ids=(0,), windows=windows))
    assert (first.load_LE == 2.0).all()
    assert (first.steps.num_steps, first.steps.num_tokens, first.steps.step_s) == (9, 8, 2.0)
    assert (second.start_s, second.duration_s, second.phase) == (2.0, 2.0, "mixed")


@pytest.mark.parametrize("num_windows", [0, 1])
def test_a_replay_needs_a_window_to_plan_on_and_one_to_serve(num_windows: int) -> None:
    with pytest.raises(LoadError, match=f"at least 2 windows, got {num_windows}"):
        simulate(_trace(num_windows), _scenario())


def test_a_start_of_another_shape_is_refused() -> None:
    scenario = replace(_scenario(), cluster=Cluster.uniform(num_ranks=2, num_physical_experts=36))
    with pytest.raises(PlacementError, match=r"\[18, 18\]"):
        simulate(_trace(), scenario)


def test_nothing_routed_is_perfectly_balanced() -> None:
    idle = LoadWindow(expert_load_LE=np.zeros((1, 8)), start_s=0.0, end_s=1.0, num_tokens=0)
    trace = LoadTrace(model="m", top_k=1, moe_layer_ids=(0,), windows=(idle, replace(idle, start_s=1.0, end_s=2.0)))
    simulation: Simulation = simulate(trace, Scenario.in_order(num_layers=1, num_experts=8, num_ranks=2))
    assert simulation.balancedness_WL.tolist() == [[1.0]]
    assert simulation.imbalance_share == 0.0


def test_synthetic_loads_are_the_same_for_the_same_seed_and_follow_their_popularity() -> None:
    first, again, other = _trace(5), _trace(5), _trace(5, seed=2)
    loads, same, different = (
        np.stack([window.expert_load_LE for window in trace.windows]) for trace in (first, again, other)
    )
    assert (loads == same).all()
    assert (loads != different).any()
    assert (loads.sum(axis=2) == 4000 * 4).all()
    still = drifting_trace(POPULARITY_LE, num_windows=50, tokens_per_window=4000, top_k=4, drift=0.0, seed=0)
    mean_LE = np.mean([window.expert_load_LE for window in still.windows], axis=0) / 16_000
    np.testing.assert_allclose(mean_LE, POPULARITY_LE, atol=0.002)


def test_domains_take_turns() -> None:
    one_hot_GLE = np.eye(3)[:, None, :]
    trace = switching_trace(
        one_hot_GLE, num_windows=7, windows_per_domain=2, tokens_per_window=5, top_k=1, seed=0, window_s=2.0
    )
    hot = [int(window.expert_load_LE.argmax()) for window in trace.windows]
    assert hot == [0, 0, 1, 1, 2, 2, 0]
    assert trace.windows[-1].end_s == 14.0
    np.testing.assert_array_equal(domain_popularity(trace)[2], [[0.0, 1.0, 0.0]])
    with pytest.raises(LoadError, match="at least 1 domain and 1 window for each, got 3 and 0"):
        switching_trace(one_hot_GLE, num_windows=1, windows_per_domain=0, tokens_per_window=5, top_k=1, seed=0)
