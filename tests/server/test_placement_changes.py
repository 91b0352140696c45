"""Changes that ranks do not answer, or too late: deadlines under a clock of the test's own, and what is sent then."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from moeserve.config import config_from_dict
from moeserve.engine.placement_messages import (
    AbortStaging,
    ChangeCommitted,
    ChangeFailed,
    ChangeStaged,
    CommitChange,
    DropChange,
    LoadReport,
    MigratorReady,
    PlacementShape,
    StageChange,
    ToMigrator,
    pack_array,
    unpack_array,
)
from moeserve.server.placement.changes import SPLIT_RETRY_S
from moeserve.server.placement.service import PlacementService
from moeserve.testing.fakes import FakeClock
from moeserve_placement import ExpertPlacement
from moeserve_placement.controller import ControlError

NUM_EXPERTS, NUM_RANKS = 8, 2
START = ExpertPlacement.identity(
    num_layers=1, num_logical_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=2
)
"""Rank 0 holds 0 1 2 3 4, rank 1 holds 5 6 7 0 1."""
UNEVEN = np.array([[0, 0, 900, 900, 900, 300, 300, 300]], dtype=np.int64)
"""Needs moves: the experts with two replicas have nothing to share."""
TILTED = np.array([[1200, 0, 600, 600, 600, 300, 300, 300]], dtype=np.int64)
"""Needs another split alone: an eighth of expert 0 on rank 0."""


@dataclass
class Ranks:
    """Keeps what is sent; says nothing by itself."""

    to_migrators: list[tuple[int, ToMigrator]] = field(default_factory=list)
    to_replicas: list[CommitChange | DropChange] = field(default_factory=list)
    unreachable: set[int] = field(default_factory=set)

    def send_to_migrator(self, rank: int, message: ToMigrator) -> bool:
        self.to_migrators.append((rank, message))
        return rank not in self.unreachable

    def send_to_replicas(self, message: CommitChange | DropChange) -> None:
        self.to_replicas.append(message)

    @property
    def orders(self) -> list[StageChange]:
        """One of each change."""
        return [message for rank, message in self.to_migrators if rank == 0 and isinstance(message, StageChange)]


@dataclass
class Frontend:
    service: PlacementService
    ranks: Ranks
    clock: FakeClock

    async def settle(self) -> None:
        """Until the service has done all it can without news or time."""
        for _ in range(3):
            with pytest.raises(ControlError):
                await self.service.apply(-1)

    async def hear(self, *messages: Any) -> None:
        for message in messages:
            self.service.receive(message.rank, message)
        await self.settle()

    async def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.settle()

    async def serve(self, load_LE: np.ndarray, num_windows: int) -> None:
        for _ in range(num_windows):
            self.clock.advance(1.0)
            self.service.receive(0, load_report(load_LE))
            await self.settle()

    async def all_staged(self, change_id: int) -> None:
        await self.hear(*[staged(rank, change_id) for rank in range(NUM_RANKS)])

    async def all_committed(self, change_id: int) -> None:
        await self.hear(*[committed(rank, change_id) for rank in range(NUM_RANKS)])


def staged(rank: int, change_id: int) -> ChangeStaged:
    return ChangeStaged(rank=rank, change_id=change_id, num_bytes=100, copy_s=0.01, lost_s=0.001)


def committed(rank: int, change_id: int) -> ChangeCommitted:
    return ChangeCommitted(rank=rank, change_id=change_id, pause_s=0.001)


def load_report(load_LE: np.ndarray) -> LoadReport:
    load, none = pack_array(load_LE, "<i8"), pack_array(np.zeros_like(load_LE), "<i8")
    return LoadReport(
        dp_rank=0, start_s=0.0, end_s=1.0, num_steps=10, num_prefill_tokens=0,
        num_decode_tokens=int(load_LE.sum()) // 2, step_s=0.8, expert_s=None, prefill_load=none, decode_load=load,
    )  # fmt: skip


def ready(rank: int, *, incarnation: str = "first", **changed: Any) -> MigratorReady:
    shape = {
        "num_layers": 1, "moe_layer_ids": [0], "num_logical_experts": NUM_EXPERTS, "top_k": 2,
        "num_physical_by_rank": [5, 5], "node_of_rank": [0, 0], "expert_bytes": 1000, "num_spare_places": 5,
    }  # fmt: skip
    return MigratorReady(
        rank=rank, incarnation=f"{incarnation}-{rank}", record_address=f"host:{rank}",
        shape=PlacementShape(**(shape | changed)), placement=pack_array(START.physical_to_logical_LP, "<i4"), epoch=0,
    )  # fmt: skip


def run(test: Callable[[Frontend], Coroutine[Any, Any, None]], **placement: Any) -> None:
    """The test beside the service, in an event loop of their own."""

    async def body() -> None:
        config = config_from_dict(
            {
                "parallel": {"tensor_parallel_size": NUM_RANKS},
                "placement": {"num_windows": 1, "hold_off_s": 0.0, **placement},
            }
        )
        clock, ranks = FakeClock(100.0), Ranks()
        service = PlacementService(config, CollectorRegistry(), clock=clock)
        running = asyncio.create_task(service.run(ranks))
        frontend = Frontend(service, ranks, clock)
        try:
            await frontend.hear(*[ready(rank) for rank in range(NUM_RANKS)])
            await test(frontend)
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(body())


def test_a_rank_that_never_stages_is_given_up_at_the_deadline() -> None:
    async def test(frontend: Frontend) -> None:
        await frontend.serve(UNEVEN, 2)
        (order,) = frontend.ranks.orders
        assert order.epoch == 1
        assert order.record_addresses == ["host:0", "host:1"]
        assert frontend.service.view.change["waiting_for_ranks"] == [0, 1]
        await frontend.hear(staged(0, order.change_id))
        assert frontend.service.view.change["waiting_for_ranks"] == [1]
        await frontend.tick(order.timeout_s - 0.1)
        assert not frontend.ranks.to_replicas
        await frontend.tick(0.2)
        assert frontend.service.view.state == "observing"
        assert frontend.service.view.failures == {"prepare deadline": 1}
        aborted = [rank for rank, message in frontend.ranks.to_migrators if isinstance(message, AbortStaging)]
        assert aborted == [0, 1]
        assert frontend.ranks.to_replicas == [DropChange(change_id=order.change_id)]
        await frontend.hear(staged(1, order.change_id))
        assert frontend.service.view.known.placement.epoch == 0

    run(test)


def test_a_commit_that_went_through_after_it_was_withdrawn_stands() -> None:
    async def test(frontend: Frontend) -> None:
        await frontend.serve(UNEVEN, 2)
        (order,) = frontend.ranks.orders
        await frontend.all_staged(order.change_id)
        assert frontend.ranks.to_replicas == [CommitChange(change_id=order.change_id)]
        await frontend.tick(31.0)
        assert frontend.ranks.to_replicas[1:] == [DropChange(change_id=order.change_id)]
        assert frontend.service.view.known.placement.epoch == 0
        await frontend.serve(UNEVEN, 1)
        second = frontend.ranks.orders[1]
        assert (second.epoch, second.change_id) == (2, order.change_id + 1)
        await frontend.hear(committed(1, order.change_id))
        assert frontend.service.view.known.placement.epoch == 1
        assert frontend.ranks.to_replicas[2:] == [DropChange(change_id=second.change_id)]
        await frontend.hear(committed(0, order.change_id), staged(0, second.change_id))
        assert frontend.service.view.state == "settling"

    run(test)


def test_a_rank_that_cannot_be_reached_fails_the_change() -> None:
    async def test(frontend: Frontend) -> None:
        frontend.ranks.unreachable = {1}
        await frontend.serve(UNEVEN, 2)
        assert frontend.service.view.failures == {"rank unreachable": 1}
        assert frontend.service.view.state == "observing"

    run(test)


def test_a_split_is_tried_again_until_it_is_in_force() -> None:
    async def test(frontend: Frontend) -> None:
        await frontend.serve(TILTED, 1)
        (first,) = frontend.ranks.orders
        assert (first.epoch, first.moves) == (0, [])
        split_LP = unpack_array(first.split, "<f4", 10)
        assert split_LP[0, [0, 8]] == pytest.approx([0.125, 0.875], abs=0.01)
        failed = ChangeFailed(rank=1, change_id=first.change_id, reason="too late: 3 s")
        await frontend.hear(staged(0, first.change_id), failed)
        assert frontend.ranks.to_replicas == [DropChange(change_id=first.change_id)]
        assert frontend.service.view.failures == {"split: too late": 1}
        await frontend.tick(0.9 * SPLIT_RETRY_S)
        assert len(frontend.ranks.orders) == 1
        await frontend.tick(0.2 * SPLIT_RETRY_S)
        second = frontend.ranks.orders[1]
        assert second.split == first.split
        await frontend.all_staged(second.change_id)
        await frontend.tick(31.0)
        assert frontend.service.view.failures == {"split: too late": 1, "split: commit deadline": 1}
        await frontend.tick(1.1 * SPLIT_RETRY_S)
        third = frontend.ranks.orders[2]
        await frontend.all_staged(third.change_id)
        await frontend.all_committed(third.change_id)
        await frontend.tick(10 * SPLIT_RETRY_S)
        assert len(frontend.ranks.orders) == 3
        assert frontend.service.view.change is None

    run(test)


def test_a_migration_waits_for_the_split_before_it() -> None:
    async def test(frontend: Frontend) -> None:
        await frontend.serve(TILTED, 1)
        (split,) = frontend.ranks.orders
        await frontend.serve(UNEVEN, 2)
        assert frontend.service.view.state == "preparing"
        assert frontend.ranks.orders == [split]
        await frontend.all_staged(split.change_id)
        await frontend.all_committed(split.change_id)
        migration = frontend.ranks.orders[1]
        assert migration.epoch == 1
        to_both = [message for _, message in frontend.ranks.to_migrators if message.change_id == migration.change_id]
        assert sum(len(order.moves) for order in to_both) > 0
        await frontend.all_staged(migration.change_id)
        await frontend.all_committed(migration.change_id)
        assert frontend.service.view.known.placement.epoch == 1

    run(test)


def test_ranks_that_disagree_are_left_as_they_are() -> None:
    async def test(frontend: Frontend) -> None:
        await frontend.hear(ready(0, incarnation="second"), ready(1, incarnation="second", expert_bytes=999))
        assert frontend.service.view.state == "static"
        assert "different expert placements" in frontend.service.view.reason
        await frontend.hear(ready(0, incarnation="third"))
        assert frontend.service.view.state == "starting"
        await frontend.hear(ready(1, incarnation="third"))
        assert frontend.service.view.state == "observing"

    run(test)


def test_a_restart_in_the_middle_of_a_commit_begins_anew() -> None:
    async def test(frontend: Frontend) -> None:
        await frontend.serve(UNEVEN, 2)
        (order,) = frontend.ranks.orders
        await frontend.all_staged(order.change_id)
        await frontend.hear(ready(1, incarnation="second"), committed(0, order.change_id))
        assert frontend.service.view.known is None
        await frontend.hear(ready(0, incarnation="second"))
        assert (frontend.service.view.state, frontend.service.view.known.placement.epoch) == ("observing", 0)
        await frontend.serve(UNEVEN, 2)
        assert frontend.ranks.orders[1].change_id > order.change_id

    run(test)


def test_messages_that_make_no_sense_are_dropped() -> None:
    async def test(frontend: Frontend) -> None:
        await frontend.hear(staged(0, 77), committed(7, 1), ChangeFailed(rank=0, change_id=5, reason="late"))
        frontend.service.receive(0, load_report(UNEVEN[:, :4]))
        frontend.service.receive(1, staged(0, 1))
        await frontend.settle()
        assert frontend.service.view.state == "observing"
        assert frontend.service.view.num_windows_seen == 0

    run(test)
