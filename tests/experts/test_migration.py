"""Parts of a migration alone: places, records, and the slot of the one change that is under way."""

import dataclasses
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.experts.migration.errors import StagingError
from moeserve.experts.migration.places import RankPlaces
from moeserve.experts.migration.record_format import pack_record, unpack_record
from moeserve.experts.migration.slot import ChangeSlot
from moeserve.experts.migration.staging import StagedChange
from moeserve.testing.placements import random_placement, random_successor
from moeserve_kernels import ExpertShape
from moeserve_placement import ExpertPlacement

TIMEOUT_S = 20.0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(2, 4),
    num_redundant=st.integers(0, 5),
    num_spare=st.integers(1, 2),
    num_changes=st.integers(1, 6),
)
def test_experts_keep_their_places_and_comers_take_free_ones(
    seed: int, num_ranks: int, num_redundant: int, num_spare: int, num_changes: int
) -> None:
    """Over a chain of placements, every rank holds what its placement says, and nothing in force was written over."""
    placement = random_placement(
        num_layers=2, num_experts=7, num_ranks=num_ranks, num_redundant_experts=num_redundant, seed=seed
    )
    ranks = [RankPlaces.in_order(placement, rank) for rank in range(num_ranks)]
    for change in range(num_changes):
        placement = random_successor(placement, seed=seed + change)
        for rank, places in enumerate(ranks):
            num_places = int(placement.num_physical_R[rank]) + num_spare
            target, arrivals = places.change_to(placement, num_places)
            for layer in range(2):
                before, after = places.held(layer), target.held(layer)
                come = {arrival.logical_id: arrival.place for arrival in arrivals if arrival.layer == layer}
                assert after.keys() == set(placement.physical_to_logical_LP[layer, placement.rank_slice(rank)].tolist())
                assert come.keys() == after.keys() - before.keys()
                assert not set(come.values()) & set(before.values()), "an expert in force would be overwritten"
                assert len(set(after.values())) == len(after)
                assert all(0 <= place < num_places for place in after.values())
                assert all(after[e] == before[e] for e in before.keys() & after.keys())
            ranks[rank] = target


def test_empty_places_are_room_for_comers() -> None:
    placement = ExpertPlacement(physical_to_logical_LP=np.array([[0, -1, 1, 2]]), num_logical_experts=3, num_ranks=2)
    target = ExpertPlacement(physical_to_logical_LP=np.array([[0, 2, 1, -1]]), num_logical_experts=3, num_ranks=2)
    places, arrivals = RankPlaces.in_order(placement, 0).change_to(target, num_places=2)
    assert [(a.logical_id, a.place) for a in arrivals] == [(2, 1)]
    assert places.place_of_local_Lp.tolist() == [[0, 1]]
    other, nothing = RankPlaces.in_order(placement, 1).change_to(target, num_places=2)
    assert nothing == []
    assert other.place_of_local_Lp.tolist() == [[0, -1]]


def test_too_few_free_places_are_refused() -> None:
    placement = ExpertPlacement.identity(num_layers=1, num_logical_experts=4, num_ranks=2)
    turned = dataclasses.replace(placement, physical_to_logical_LP=np.array([[2, 3, 0, 1]]))
    with pytest.raises(StagingError, match="no spare place: rank 0 has 1 in layer 0, the change needs 2"):
        RankPlaces.in_order(placement, 0).change_to(turned, num_places=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_records_travel_to_the_bit(dtype: torch.dtype, quantization: str | None, has_bias: bool) -> None:
    """Odd sizes: with int8 weights the scales behind them start anywhere."""
    shape = ExpertShape(hidden_size=5, width=3, dtype=dtype, has_bias=has_bias, quantization=quantization)
    generator = torch.Generator().manual_seed(0)
    record = {
        name: (torch.randn(size, generator=generator) * 50).to(kind) for name, (size, kind) in shape.record.items()
    }
    data = bytearray(pack_record(record).numpy())
    assert len(data) == shape.record_bytes
    unpacked = unpack_record(data, shape)
    assert unpacked.keys() == record.keys()
    for name, tensor in unpacked.items():
        assert tensor.dtype == record[name].dtype
        assert torch.equal(tensor, record[name])


def staged(change_id: int) -> StagedChange:
    placement = ExpertPlacement.identity(num_layers=1, num_logical_experts=2, num_ranks=1)
    return StagedChange(change_id=change_id, places=RankPlaces.in_order(placement, 0), tables=[], num_bytes=0)


def stage(slot: ChangeSlot, change_id: int, *, meanwhile: Callable[[], None] | None = None) -> None:
    aborted = slot.announce(change_id)
    with slot.turn(change_id, time.monotonic() + TIMEOUT_S):
        if meanwhile is not None:
            meanwhile()
            assert aborted.is_set()
        slot.put(staged(change_id))


def test_a_staged_change_is_taken_once() -> None:
    slot = ChangeSlot()
    stage(slot, 1)
    slot.abort(1)
    assert slot.is_staged(1), "only the leader may withdraw what is staged"
    assert slot.take(1).change_id == 1
    assert not slot.is_staged(1)
    stage(slot, 2)
    with pytest.raises(AssertionError):
        slot.take(1)


@pytest.mark.parametrize("end", [lambda slot: slot.abort(3), lambda slot: slot.withdraw(3), ChangeSlot.abort_all])
def test_a_change_that_ends_while_it_is_copied_is_not_staged(end: Callable[[ChangeSlot], None]) -> None:
    slot = ChangeSlot()
    with pytest.raises(StagingError, match="aborted"):
        stage(slot, 3, meanwhile=lambda: end(slot))
    assert not slot.is_staged(3)
    stage(slot, 4)


def test_a_withdrawal_may_come_before_the_order() -> None:
    slot = ChangeSlot()
    slot.withdraw(5)
    with pytest.raises(StagingError, match="aborted"):
        stage(slot, 5)
    stage(slot, 6)
    slot.withdraw(7)  # and takes all before it along
    assert not slot.is_staged(6)


@pytest.mark.parametrize("free", [lambda slot: slot.withdraw(1), lambda slot: slot.take(1)])
def test_the_next_change_waits_until_the_slot_is_empty(free: Callable[[ChangeSlot], object]) -> None:
    slot = ChangeSlot()
    stage(slot, 1)
    slot.announce(2)
    with pytest.raises(StagingError, match="too late"), slot.turn(2, time.monotonic() + 0.01):
        raise AssertionError("it had its turn")
    waiting = threading.Thread(target=stage, args=(slot, 3))
    waiting.start()
    free(slot)
    waiting.join(TIMEOUT_S)
    assert slot.is_staged(3)
