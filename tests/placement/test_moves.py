"""Moves between placements: applying them gives the target, sources hold what they send, nothing moves in vain."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT
from moeserve.testing.placements import random_placement
from moeserve_placement import Cluster, ExpertPlacement, PlanSettings, plan
from moeserve_placement.arrays import with_column
from moeserve_placement.moves import keep_in_place, moves_between, relabel_ranks
from moeserve_placement.split import even_tokens


@st.composite
def two_placements(draw: st.DrawFn) -> tuple[ExpertPlacement, ExpertPlacement]:
    """Of the same shape, at random."""
    num_ranks = draw(st.integers(1, 6))
    num_experts = draw(st.integers(num_ranks, 16))
    num_redundant = draw(st.integers(0, min(8, num_experts * (num_ranks - 1))))
    first, second = (
        random_placement(
            num_layers=3,
            num_experts=num_experts,
            num_ranks=num_ranks,
            num_redundant_experts=num_redundant,
            seed=draw(st.integers(0, 999)),
        )
        for _ in range(2)
    )
    return first, second


@PATIENT
@given(case=two_placements())
def test_applying_the_moves_gives_the_target(case: tuple[ExpertPlacement, ExpertPlacement]) -> None:
    current, target = case
    cluster = Cluster.of(current, num_nodes=min(2, current.num_ranks))
    moves = moves_between(current, target, cluster, expert_bytes=7)
    table_LP = current.physical_to_logical_LP.copy()
    for move in moves:
        assert current.physical_to_logical_LP[move.layer, move.source_physical_id] == move.logical_expert_id
        table_LP[move.layer, move.destination_physical_id] = move.logical_expert_id
        held = np.flatnonzero(current.physical_to_logical_LP[move.layer] == move.logical_expert_id)
        rank_of, node_of = cluster.rank_of_place_P, cluster.node_R[cluster.rank_of_place_P]
        for near_P in (rank_of, node_of):
            if (near_P[held] == near_P[move.destination_physical_id]).any():
                assert near_P[move.source_physical_id] == near_P[move.destination_physical_id]
                break
    assert (table_LP == target.physical_to_logical_LP).all()
    assert moves.num_bytes == 7 * len(moves) == 7 * len(list(moves))


@PATIENT
@given(case=two_placements())
def test_experts_that_stay_on_a_rank_do_not_move(case: tuple[ExpertPlacement, ExpertPlacement]) -> None:
    current, target = case
    cluster = Cluster.of(current)
    current_LP, target_LP = current.physical_to_logical_LP, target.physical_to_logical_LP
    load_LE = np.random.default_rng(0).random((3, current.num_logical_experts))
    tokens_LP = even_tokens(target_LP, load_LE)
    kept_LP, kept_tokens_LP = keep_in_place(target_LP, tokens_LP, current_LP, cluster)
    np.testing.assert_allclose(kept_tokens_LP, even_tokens(kept_LP, load_LE))
    for layer in range(3):
        for rank in range(current.num_ranks):
            places = cluster.places(rank)
            assert sorted(kept_LP[layer, places]) == sorted(target_LP[layer, places])
            stayed = np.isin(current_LP[layer, places], target_LP[layer, places])
            assert (kept_LP[layer, places][stayed] == current_LP[layer, places][stayed]).all()


@PATIENT
@given(case=two_placements())
def test_renaming_ranks_only_ever_saves_moves(case: tuple[ExpertPlacement, ExpertPlacement]) -> None:
    current, target = case
    cluster, num_experts = Cluster.of(current), current.num_logical_experts
    current_LP, target_LP = current.physical_to_logical_LP, target.physical_to_logical_LP
    tokens_LP = target_LP.astype(np.float64)
    renamed_LP, renamed_tokens_LP = relabel_ranks(target_LP, tokens_LP, current_LP, cluster, num_experts)
    assert (renamed_tokens_LP == renamed_LP).all()

    def num_moves(table_LP: np.ndarray) -> np.ndarray:
        return (keep_in_place(table_LP, tokens_LP, current_LP, cluster)[0] != current_LP).sum(axis=1)

    assert (num_moves(renamed_LP) <= num_moves(target_LP)).all()
    for layer in range(3):
        ranks = [
            frozenset(table[layer, cluster.places(r)])
            for table in (target_LP, renamed_LP)
            for r in range(cluster.num_ranks)
        ]
        assert sorted(map(sorted, ranks[: cluster.num_ranks])) == sorted(map(sorted, ranks[cluster.num_ranks :]))


def test_layers_with_most_gain_for_each_byte_come_first_and_stay_whole() -> None:
    load_LE = np.random.default_rng(0).exponential(100.0, (6, 32)) ** 2
    current = ExpertPlacement.identity(num_layers=6, num_logical_experts=32, num_ranks=8, num_redundant_experts=8)
    cluster = Cluster.of(current)
    result = plan(load_LE, current, cluster, PlanSettings(expert_bytes=1000))
    moves = list(result.moves)
    assert [move.gain_per_byte for move in moves] == sorted((move.gain_per_byte for move in moves), reverse=True)
    layers = [move.layer for move in moves]
    assert sum(a != b for a, b in pairwise(layers)) + 1 == len(set(layers))
    first = layers[0]
    gain = result.rank_load_resplit_LR[first].max() - result.rank_load_after_LR[first].max()
    assert moves[0].gain_per_byte * 1000 * layers.count(first) == np.float64(gain)


def test_sources_take_turns() -> None:
    # Expert 0 lies on ranks 0 to 3; four layers want it on rank 4.
    row = np.array([0, 1, 0, 2, 0, 3, 0, 4, 5, 6])
    current = ExpertPlacement(physical_to_logical_LP=np.tile(row, (4, 1)), num_logical_experts=7, num_ranks=5)
    wanted = np.tile(row, (4, 1))
    wanted[:, 8], wanted[:, 0] = 0, 5
    target = ExpertPlacement(physical_to_logical_LP=wanted, num_logical_experts=7, num_ranks=5)
    sources = [
        m.source_physical_id for m in moves_between(current, target, Cluster.of(current)) if not m.logical_expert_id
    ]
    assert len(set(sources)) > 1


def test_an_empty_column_pads_what_index_minus_one_finds() -> None:
    assert with_column(np.array([[1, 2]]), -1)[0, -1] == -1
