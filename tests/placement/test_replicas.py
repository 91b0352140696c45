"""Replica counts against giving them out one by one, and the bound against its meaning."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT, expert_loads, loads_and_clusters
from moeserve_placement import PlacementError
from moeserve_placement.arrays import FloatArray
from moeserve_placement.bound import balancedness_bound, lowest_level
from moeserve_placement.cluster import Cluster
from moeserve_placement.replicas import replica_counts


def _one_by_one(load_E: FloatArray, num_physical: int, max_replicas: int) -> FloatArray:
    count_E = np.ones(load_E.size)
    for _ in range(num_physical - load_E.size):
        count_E[np.where(count_E < max_replicas, load_E / count_E, -1.0).argmax()] += 1
    return count_E


@PATIENT
@given(load_LE=expert_loads(num_layers=2, num_experts=7), num_physical=st.integers(7, 28))
def test_counts_are_those_of_giving_to_the_hottest(load_LE: FloatArray, num_physical: int) -> None:
    counts_LE = replica_counts(load_LE, np.full(2, num_physical), 4)
    assert (counts_LE.sum(axis=1) == num_physical).all()
    assert ((counts_LE >= 1) & (counts_LE <= 4)).all()
    for load_E, count_E in zip(load_LE, counts_LE, strict=True):
        expected_E = _one_by_one(load_E, num_physical, 4)
        # Ties may go to another expert: the hottest replica is what is defined.
        assert (load_E / count_E).max() == pytest.approx((load_E / expected_E).max(), rel=1e-6)


def test_least_counts_hold() -> None:
    counts_LE = replica_counts(np.array([[100.0, 1.0, 1.0]]), np.array([6]), 4, np.array([[1, 3, 0]]))
    assert counts_LE.tolist() == [[3, 3, 0]]


@pytest.mark.parametrize("num_physical", [3, 17])
def test_sums_that_cannot_be_are_refused(num_physical: int) -> None:
    with pytest.raises(PlacementError, match=r"num_physical must be in \[4, 16\]"):
        replica_counts(np.ones((1, 4)), np.array([num_physical]), 4)


@PATIENT
@given(case=loads_and_clusters())
def test_the_bound_has_room_for_every_expert(case: tuple[FloatArray, Cluster]) -> None:
    load_LE, cluster = case
    level_L = lowest_level(load_LE, cluster)
    assert (level_L >= load_LE.sum(axis=1) / cluster.capacity_R.sum() * (1 - 1e-9)).all()
    reach_R = np.cumsum(np.sort(cluster.capacity_R)[::-1])
    for load_E, level in zip(load_LE, level_L * (1 + 1e-6), strict=True):
        needed = [int((reach_R * level < load).sum()) + 1 for load in load_E]
        assert sum(needed) <= cluster.num_physical_experts


def test_an_expert_that_outweighs_the_rest_sets_the_bound() -> None:
    # 90 of 120 tokens on at most 2 of 3 ranks: 45 against a mean of 40.
    cluster = Cluster.uniform(num_ranks=3, num_physical_experts=5)
    load_LE = np.array([[90.0, 10.0, 10.0, 10.0]])
    assert balancedness_bound(load_LE, cluster)[0] == pytest.approx(40 / 45)
    assert balancedness_bound(load_LE, Cluster.uniform(num_ranks=3, num_physical_experts=6))[0] == 1.0
