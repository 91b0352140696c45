"""The comparison algorithm: its published example, its two policies, and twins set apart."""

import numpy as np
import pytest
from hypothesis import given

from moeserve.testing.expert_loads import PATIENT, loads_and_clusters
from moeserve_placement import Cluster, ExpertPlacement, PlacementError
from moeserve_placement.arrays import FloatArray
from moeserve_placement.cost import balancedness, by_rank
from moeserve_placement.eplb import eplb_global, eplb_hierarchical, merge_twins, part_twins, twins
from moeserve_placement.split import Effort, balanced_tokens, even_tokens

EXAMPLE_LE = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=np.float64,
)
"""The published example: two layers of 12 experts in 4 groups, 16 places, 8 ranks on 2 nodes."""


def test_the_published_example_comes_out() -> None:
    table_LP = eplb_hierarchical(EXAMPLE_LE, num_physical=16, num_ranks=8, num_nodes=2, num_groups=4)
    expected_LP = np.array(
        [
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ]
    )
    cluster = Cluster.uniform(num_ranks=8, num_physical_experts=16, num_nodes=2)
    # Nodes, and ranks within a node, may come in another order: what counts is which experts lie together.
    for ours, published in zip(table_LP, expected_LP, strict=True):
        ranks = [sorted(tuple(sorted(row[cluster.places(r)])) for r in range(8)) for row in (ours, published)]
        assert ranks[0] == ranks[1]


def test_groups_stay_on_one_node() -> None:
    load_LE = np.random.default_rng(0).exponential(1.0, (5, 32))
    table_LP = eplb_hierarchical(load_LE, num_physical=48, num_ranks=8, num_nodes=4, num_groups=8)
    node_P = np.arange(48) // 12
    for row in table_LP:
        for group in range(8):
            assert np.unique(node_P[row // 4 == group]).size == 1


def test_known_quality_on_skewed_loads(dirichlet_loads: FloatArray) -> None:
    table_LP = eplb_global(dirichlet_loads, num_physical=288, num_ranks=32)
    cluster = Cluster.uniform(num_ranks=32, num_physical_experts=288)
    reached_L = balancedness(by_rank(even_tokens(table_LP, dirichlet_loads), cluster), cluster)
    assert 0.98 < reached_L.mean() < 0.998


@PATIENT
@given(case=loads_and_clusters(equal=True))
def test_twins_are_set_apart(case: tuple[FloatArray, Cluster]) -> None:
    load_LE, cluster = case
    table_LP = eplb_global(load_LE, num_physical=cluster.num_physical_experts, num_ranks=cluster.num_ranks)
    published_L = by_rank(even_tokens(table_LP, load_LE), cluster).max(axis=1)
    for valid_LP in (part_twins(table_LP, load_LE, cluster), merge_twins(table_LP, load_LE, cluster)):
        assert not twins(valid_LP, cluster, load_LE.shape[1]).any()
        ExpertPlacement(
            physical_to_logical_LP=valid_LP, num_logical_experts=load_LE.shape[1], num_ranks=cluster.num_ranks
        )
    merged_LP = merge_twins(table_LP, load_LE, cluster)
    merged_L = by_rank(
        balanced_tokens(merged_LP, load_LE, cluster, effort=Effort(tolerance=1e-6, max_iterations=2000)), cluster
    ).max(axis=1)
    assert (merged_L <= published_L * 1.005 + 1e-9).all()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((24, 7, 1, 1), "ranks that divide the 24 physical experts"),
        ((24, 8, 3, 6), "nodes that divide the 8 ranks"),
        ((24, 8, 2, 5), "groups that divide the 12 experts"),
        ((24, 8, 4, 6), "nodes that divide the 6 groups"),
    ],
)
def test_uneven_shapes_are_refused(sizes: tuple[int, int, int, int], words: str) -> None:
    num_physical, num_ranks, num_nodes, num_groups = sizes
    with pytest.raises(PlacementError, match=words):
        eplb_hierarchical(
            np.ones((1, 12)), num_physical=num_physical, num_ranks=num_ranks, num_nodes=num_nodes, num_groups=num_groups
        )
