"""Expert placements: derived maps agree with the table, and a table that breaks a promise is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement import ExpertPlacement, PlacementError


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Random valid placements: experts shuffled over uneven ranks, some of them replicated on ranks that lack them."""
    num_ranks = draw(st.integers(1, 5))
    num_logical = draw(st.integers(num_ranks, 20))
    num_redundant = draw(st.integers(0, min(6, num_logical * (num_ranks - 1))))
    base = ExpertPlacement.identity(
        num_layers=draw(st.integers(1, 3)),
        num_logical_experts=num_logical,
        num_ranks=num_ranks,
        num_redundant_experts=num_redundant,
    )
    renaming = draw(st.permutations(range(num_logical)))
    table = np.asarray(renaming, dtype=np.int64)[base.physical_to_logical_LP]
    return ExpertPlacement(physical_to_logical_LP=table, num_logical_experts=num_logical, num_ranks=num_ranks, epoch=3)


@given(placement=placements())
def test_derived_maps_agree_with_the_table(placement: ExpertPlacement) -> None:
    table = placement.physical_to_logical_LP
    assert (placement.num_replicas_LE.sum(axis=1) == placement.num_physical_experts).all()
    assert (placement.num_replicas_LE >= 1).all()
    for layer in range(placement.num_layers):
        listed = placement.logical_to_physical_LEC[layer]
        for logical in range(placement.num_logical_experts):
            replicas = listed[logical][listed[logical] >= 0]
            assert replicas.tolist() == np.flatnonzero(table[layer] == logical).tolist()
            assert (listed[logical][replicas.size :] == -1).all()


@given(placement=placements())
def test_ranks_share_the_physical_experts(placement: ExpertPlacement) -> None:
    held = [list(range(placement.num_physical_experts))[placement.rank_slice(r)] for r in range(placement.num_ranks)]
    assert [physical for ids in held for physical in ids] == list(range(placement.num_physical_experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for rank, ids in enumerate(held):
        assert (placement.rank_of_physical_P[ids] == rank).all()


@given(placement=placements())
def test_json_encodes_what_it_decodes(placement: ExpertPlacement, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("placement") / "saved.json"
    placement.save(path)
    loaded = ExpertPlacement.load(path)
    assert (loaded.physical_to_logical_LP == placement.physical_to_logical_LP).all()
    assert (loaded.num_ranks, loaded.epoch) == (placement.num_ranks, placement.epoch)


@pytest.mark.parametrize(
    ("table", "num_logical", "num_ranks", "words"),
    [
        ([[0, 1, 1, 3]], 4, 2, "layer 0: logical expert 2 has no physical expert"),
        ([[0, 1], [0, 2]], 2, 1, r"layer 1: logical expert ids must be in \[0, 2\)"),
        ([[0, 0, 1, 2]], 3, 2, r"layer 0: rank 0 holds two copies of one expert: \[0, 0\]"),
        ([[0, 1, 2, 0], [0, 1, 2, 2]], 3, 2, r"layer 1: rank 1 holds two copies of one expert: \[2, 2\]"),
        ([[0, 1, 2, 3, 0], [0, 1, 2, 3, 3]], 4, 2, r"layer 1: rank 1 holds two copies of one expert: \[3, 3\]"),
        ([[0, 1]], 3, 1, "2 physical experts are too few for 3 logical experts"),
        ([[0, 1]], 2, 3, "too few for 2 logical experts on 3 ranks"),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    table: list[list[int]], num_logical: int, num_ranks: int, words: str
) -> None:
    with pytest.raises(PlacementError, match=words):
        ExpertPlacement(physical_to_logical_LP=np.asarray(table), num_logical_experts=num_logical, num_ranks=num_ranks)


def test_more_copies_than_ranks_are_refused() -> None:
    with pytest.raises(PlacementError, match="num_redundant_experts must be at most 4"):
        ExpertPlacement.identity(num_layers=1, num_logical_experts=4, num_ranks=2, num_redundant_experts=5)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "other"}', json.dumps({"format": "moeserve-placement-1"})]
)
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(PlacementError, match=r"bad\.json"):
        ExpertPlacement.load(path)


def test_ranks_may_hold_different_numbers(tmp_path: Path) -> None:
    placement = ExpertPlacement(
        physical_to_logical_LP=np.array([[0, 1, 2, 3, 0, 3]]),
        num_logical_experts=4,
        num_ranks=3,
        num_physical_by_rank=(1, 3, 2),
    )
    assert [placement.rank_slice(rank) for rank in range(3)] == [slice(0, 1), slice(1, 4), slice(4, 6)]
    assert placement.rank_of_physical_P.tolist() == [0, 1, 1, 1, 2, 2]
    placement.save(tmp_path / "uneven.json")
    assert ExpertPlacement.load(tmp_path / "uneven.json").num_physical_by_rank == (1, 3, 2)


def test_places_may_stay_empty(tmp_path: Path) -> None:
    table = np.array([[0, -1, 1, 0], [-1, 1, 0, -1]])
    placement = ExpertPlacement(physical_to_logical_LP=table, num_logical_experts=2, num_ranks=2)
    assert placement.num_replicas_LE.tolist() == [[2, 1], [1, 1]]
    assert placement.logical_to_physical_LEC.tolist() == [[[0, 3], [2, -1]], [[2, -1], [1, -1]]]
    placement.save(tmp_path / "gaps.json")
    assert (ExpertPlacement.load(tmp_path / "gaps.json").physical_to_logical_LP == table).all()


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1, 1, 0), (3, 3, 1)])
def test_sizes_of_ranks_must_add_up(sizes: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError, match="num_physical_by_rank must be 3 numbers of at least 1 that sum to 6"):
        ExpertPlacement(
            physical_to_logical_LP=np.array([[0, 1, 2, 3, 0, 3]]),
            num_logical_experts=4,
            num_ranks=3,
            num_physical_by_rank=sizes,
        )
