"""Advice: agrees with the replays it is made of, and says enough where enough is known beforehand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moeserve_placement import PlanSettings
from moeserve_placement.advisor import Advice, advise
from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller import ControllerSettings
from moeserve_placement.load import LoadTrace
from moeserve_placement.scenario import Scenario
from moeserve_placement.simulator import simulate
from moeserve_placement.synthetic import dirichlet_popularity, drifting_trace

SETTINGS = ControllerSettings(expert_share=0.4)


def _trace(popularity_LE: FloatArray, *, drift: float = 0.0) -> LoadTrace:
    trace = drifting_trace(popularity_LE, num_windows=40, tokens_per_window=50_000, top_k=2, drift=drift, seed=0)
    # The first layers of many models are dense.
    return replace(trace, moe_layer_ids=tuple(range(3, 3 + len(popularity_LE))))


def _scenario(popularity_LE: FloatArray, *, places_per_rank: int | None = None) -> Scenario:
    num_layers, num_experts = popularity_LE.shape
    scenario = Scenario.in_order(
        num_layers=num_layers, num_experts=num_experts, num_ranks=4, places_per_rank=places_per_rank
    )
    return replace(scenario, plan_settings=PlanSettings(expert_bytes=1000), controller=SETTINGS)


def _advice(popularity_LE: FloatArray) -> Advice:
    return advise(_trace(popularity_LE), _scenario(popularity_LE))


def test_advice_is_the_difference_of_two_replays() -> None:
    popularity_LE = dirichlet_popularity(np.random.default_rng(0), num_layers=3, num_experts=16, concentration=1.0)
    trace, scenario = _trace(popularity_LE, drift=0.05), _scenario(popularity_LE)
    advice = advise(trace, scenario)
    frozen, followed = (simulate(trace, scenario.with_policy(policy)) for policy in ("frozen", "incremental"))
    share = 0.4 / frozen.highest_WL.sum()
    assert advice.lost_share_frozen == pytest.approx(0.4 * frozen.imbalance_share)
    assert advice.lost_share_followed == pytest.approx(share * (followed.highest_WL - followed.mean_WL).sum())
    cost = followed.lost_s / trace.windows[-1].end_s
    assert advice.saved_share == pytest.approx(advice.lost_share_frozen - advice.lost_share_followed - cost)
    assert sum(layer.saved_share for layer in advice.layers) == pytest.approx(advice.saved_share + cost)
    assert [layer.layer for layer in advice.layers] == [3, 4, 5]
    assert advice.hours == pytest.approx(400 / 3600)
    first = np.flatnonzero(followed.moves_W)[0]
    assert advice.first_moves == followed.moves_W[first]
    later_s = followed.time_W[-1] - followed.time_W[first]
    assert advice.moves_per_hour == pytest.approx(followed.moves_W[first + 1 :].sum() / later_s * 3600)
    assert advice.bytes_per_hour == 1000 * advice.moves_per_hour


def test_flat_loads_have_nothing_to_gain_and_need_no_redundant_expert() -> None:
    popularity_LE = np.full((2, 16), 1 / 16)
    advice = advise(_trace(popularity_LE), _scenario(popularity_LE, places_per_rank=4))
    assert abs(advice.saved_share) < 0.002
    assert advice.first_moves == advice.moves_per_hour == 0
    assert advice.enough_redundant_experts == 0
    assert advice.curve[0].bytes_per_rank == 0


def test_an_expert_hotter_than_a_rank_needs_replicas() -> None:
    # Half of the load on one expert of four ranks.
    popularity_LE = np.full((2, 16), 0.5 / 15)
    popularity_LE[:, 5] = 0.5
    advice = _advice(popularity_LE)
    none, some = advice.curve[0], advice.curve[1]
    # Three more experts lie on its rank.
    assert none.balancedness == pytest.approx(0.25 / 0.6, abs=0.01)
    assert some.balancedness > 0.97
    assert advice.enough_redundant_experts == some.num_redundant_experts == 4
    assert some.bytes_per_rank == 4 * 2 * 1000 // 4
    assert advice.layers[0].balancedness_followed > advice.layers[0].balancedness_frozen


def test_advice_is_plain_and_its_tables_are_whole() -> None:
    advice = _advice(np.full((2, 16), 1 / 16))
    record = json.loads(json.dumps(advice.to_dict()))
    assert [layer["layer"] for layer in record["layers"]] == [3, 4]
    assert record["enough_redundant_experts"] == 0
    rows = [row for row in advice.table().splitlines() if row.startswith("|")]
    assert len(rows) == (2 + 2) + (2 + len(advice.curve))
    assert sum("enough" in row for row in rows) == 1
