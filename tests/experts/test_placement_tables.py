"""The lookup from (logical expert, token row) to physical and local experts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.experts.placement_tables import NUM_BUCKETS, PlacementTables
from moeserve.testing.placements import random_placement
from moeserve_placement import ExpertPlacement

CPU = torch.device("cpu")


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    num_experts = draw(st.integers(1, 9))
    num_ranks = draw(st.integers(1, 5))
    least = max(0, num_ranks - num_experts)
    num_redundant = draw(st.integers(least, max(least, num_experts * (num_ranks - 1))))
    return random_placement(
        num_layers=2,
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_redundant_experts=num_redundant,
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None)
@given(placement=placements(), first_row=st.integers(0, 200), num_rows=st.integers(0, 9))
def test_every_choice_is_a_replica_of_its_expert_and_lies_on_exactly_one_rank(
    placement: ExpertPlacement, first_row: int, num_rows: int
) -> None:
    expert_ids_TK = torch.arange(placement.num_logical_experts).expand(num_rows, -1)
    for layer in range(placement.num_layers):
        tables = [PlacementTables.build(placement, layer, rank=r, device=CPU) for r in range(placement.num_ranks)]
        physical_TK = tables[0].choose_physical(expert_ids_TK, first_row)
        logical_TK = placement.physical_to_logical_LP[layer][physical_TK.numpy()]
        assert np.array_equal(logical_TK, expert_ids_TK.numpy())
        nobody = torch.full_like(expert_ids_TK, -1)
        assert torch.equal(tables[0].choose_physical(nobody, first_row), nobody)
        assert torch.equal(tables[0].choose_local(nobody, first_row), nobody)
        local_RTK = torch.stack([table.choose_local(expert_ids_TK, first_row) for table in tables])
        assert ((local_RTK >= 0).sum(dim=0) == 1).all()
        for rank, table in enumerate(tables):
            mine = local_RTK[rank] >= 0
            assert torch.equal(local_RTK[rank][mine] + placement.rank_slice(rank).start, physical_TK[mine]), (
                "local and physical choice differ"
            )
            assert torch.equal(table.choose_physical(expert_ids_TK, first_row), physical_TK)
            assert sum(table.num_physical_by_rank) == placement.num_physical_experts


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_replicas_share_the_rows_evenly(num_ranks: int) -> None:
    placement = ExpertPlacement.identity(
        num_layers=1, num_logical_experts=4, num_ranks=num_ranks, num_redundant_experts=4 * (num_ranks - 1)
    )
    tables = PlacementTables.build(placement, 0, rank=0, device=CPU)
    rows = torch.zeros(3 * NUM_BUCKETS, 1, dtype=torch.int64)
    counts = tables.choose_physical(rows, first_row=7).flatten().bincount(minlength=placement.num_physical_experts)
    used = counts[counts > 0]
    assert used.numel() == num_ranks
    assert used.max() - used.min() <= 3  # at most one a bucket round


def test_consecutive_rows_alternate_between_two_replicas() -> None:
    placement = ExpertPlacement.identity(num_layers=1, num_logical_experts=2, num_ranks=2, num_redundant_experts=2)
    tables = PlacementTables.build(placement, 0, rank=0, device=CPU)
    chosen = tables.choose_physical(torch.zeros(6, 1, dtype=torch.int64), first_row=0).flatten().tolist()
    assert chosen[0::2] == [chosen[0]] * 3
    assert chosen[1::2] == [chosen[1]] * 3
    assert chosen[0] != chosen[1]


def test_without_replicas_there_is_one_column() -> None:
    placement = ExpertPlacement.identity(num_layers=1, num_logical_experts=5, num_ranks=3)
    assert PlacementTables.build(placement, 0, rank=1, device=CPU).physical_EC.shape == (5 + 1, 1)


@settings(max_examples=60, deadline=None)
@given(placement=placements(), seed=st.integers(0, 99))
def test_replicas_share_the_buckets_by_their_weights(placement: ExpertPlacement, seed: int) -> None:
    """To less than one bucket, and every run of neighbours as near to its share as whole buckets let it be."""
    weight_P = np.random.default_rng(seed).random(placement.num_physical_experts) ** 3
    for layer in range(placement.num_layers):
        tables = PlacementTables.build(placement, layer, rank=0, device=CPU, split_P=weight_P)
        logical_P = placement.physical_to_logical_LP[layer]
        physical_EC = tables.physical_EC[:-1].numpy()
        num_buckets = physical_EC.shape[1]
        for logical, chosen_C in enumerate(physical_EC):
            replicas = np.flatnonzero(logical_P == logical)
            exact = weight_P[replicas] / weight_P[replicas].sum()
            taken_CJ = np.cumsum(chosen_C[:, None] == replicas, axis=0)
            assert np.abs(taken_CJ[-1] - exact * num_buckets).max() < 1.0 + 1e-9
            share_J = taken_CJ[-1] / num_buckets
            due_CJ = np.arange(1, num_buckets + 1)[:, None] * share_J
            assert np.abs(taken_CJ - due_CJ).max() <= max(1.0, len(replicas) / 2)


def test_places_of_the_store_are_what_the_rank_is_told() -> None:
    placement = random_placement(num_layers=1, num_experts=6, num_ranks=2, num_redundant_experts=2, seed=4)
    plain = PlacementTables.build(placement, 0, rank=1, device=CPU)
    place_of_local_p = np.array([4, 2, 0, 5])
    moved = PlacementTables.build(placement, 0, rank=1, device=CPU, place_of_local_p=place_of_local_p)
    place_of = torch.from_numpy(np.append(place_of_local_p, -1))
    assert torch.equal(moved.physical_EC, plain.physical_EC)
    for name in ("local_EC", "local_of_run", "local_of_physical"):
        assert torch.equal(getattr(moved, name), place_of[getattr(plain, name)]), name


def test_an_empty_place_is_never_chosen() -> None:
    placement = ExpertPlacement(
        physical_to_logical_LP=np.array([[0, 1, -1, 1, 2, -1]]), num_logical_experts=3, num_ranks=2
    )
    tables = PlacementTables.build(placement, 0, rank=0, device=CPU, split_P=np.ones(6))
    chosen = tables.choose_physical(torch.tensor([[0, 1, 2]]).expand(9, -1), first_row=0)
    assert set(chosen.flatten().tolist()) == {0, 1, 3, 4}


@settings(max_examples=30, deadline=None)
@given(placement=placements(), seed=st.integers(0, 99))
def test_any_placement_of_the_shape_takes_force_in_the_same_memory(placement: ExpertPlacement, seed: int) -> None:
    """Also one whose replicas are other experts', or more of one."""
    other = random_placement(
        num_layers=1,
        num_experts=placement.num_logical_experts,
        num_ranks=placement.num_ranks,
        num_redundant_experts=placement.num_redundant_experts,
        seed=seed,
    )
    tables, wanted = (PlacementTables.build(p, 0, rank=0, device=CPU) for p in (placement, other))
    names = ("physical_EC", "local_EC", "local_of_run", "local_of_physical")
    memory = [getattr(tables, name).data_ptr() for name in names]
    tables.take_over(wanted)
    assert [getattr(tables, name).data_ptr() for name in names] == memory
    for name in names:
        assert torch.equal(getattr(tables, name), getattr(wanted, name)), name
