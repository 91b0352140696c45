"""The placement side of a frontend for tests: it stages, commits and drops changes on real ranks, one at a time."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from moeserve.engine.placement_messages import (
    AbortStaging,
    ChangeCommitted,
    ChangeFailed,
    ChangeStaged,
    CommitChange,
    DropChange,
    MigratorReady,
    MoveOrder,
    StageChange,
    ToMigrator,
    migrator_identity,
    pack_array,
    unpack_array,
)
from moeserve.testing.fake_frontend import FakeFrontend
from moeserve_placement import Cluster, ExpertPlacement
from moeserve_placement.moves import moves_between

NewsT = TypeVar("NewsT", ChangeStaged, ChangeFailed, ChangeCommitted)
Floats = npt.NDArray[np.float64]


class ChangeDriver:
    """Waits for what ranks say as long as the fake frontend does."""

    def __init__(self, frontend: FakeFrontend, num_ranks: int) -> None:
        """Returns when all ranks have said hello."""
        self._frontend = frontend
        self._num_ranks = num_ranks
        frontend.receive_until(lambda: len(self._hellos()) == num_ranks)
        self.ready = [self._hellos()[rank] for rank in range(num_ranks)]
        shape = self.ready[0].shape
        sizes = shape.num_physical_by_rank
        self.placement = ExpertPlacement(
            physical_to_logical_LP=unpack_array(self.ready[0].placement, "<i4", sum(sizes)).astype(np.int64),
            num_logical_experts=shape.num_logical_experts,
            num_ranks=num_ranks,
            epoch=self.ready[0].epoch,
            num_physical_by_rank=tuple(sizes),
        )
        """In force."""
        self.addresses = [hello.record_address for hello in self.ready]
        self.last_change_id = 0

    def stage(
        self,
        target: ExpertPlacement,
        split_LP: Floats | None = None,
        *,
        addresses: Sequence[str] | None = None,
        bytes_per_s: float = 1e9,
        timeout_s: float = 20.0,
    ) -> int:
        """Order a change of all ranks; returns its id."""
        self.last_change_id += 1
        shape = self.ready[0].shape
        cluster = Cluster(
            num_physical_by_rank=tuple(shape.num_physical_by_rank),
            capacity_by_rank=(1.0,) * self._num_ranks,
            node_of_rank=tuple(shape.node_of_rank),
        )
        moves = list(moves_between(self.placement, target, cluster))
        if split_LP is None:
            split_LP = np.ones(target.physical_to_logical_LP.shape)
        for rank in range(self._num_ranks):
            orders = [
                MoveOrder(
                    layer=move.layer,
                    logical_id=move.logical_expert_id,
                    source_rank=int(cluster.rank_of_place_P[move.source_physical_id]),
                    source_physical_id=move.source_physical_id,
                    destination_physical_id=move.destination_physical_id,
                )
                for move in moves
                if cluster.rank_of_place_P[move.destination_physical_id] == rank
            ]
            order = StageChange(
                change_id=self.last_change_id,
                epoch=target.epoch,
                placement=pack_array(target.physical_to_logical_LP, "<i4"),
                split=pack_array(split_LP, "<f4"),
                moves=orders,
                record_addresses=list(addresses or self.addresses),
                bytes_per_s=bytes_per_s,
                timeout_s=timeout_s,
            )
            self._tell(rank, order)
        return self.last_change_id

    def wait_staged(self, change_id: int) -> list[ChangeStaged]:
        """Of all ranks; fails where one of them could not."""
        self._frontend.receive_until(
            lambda: (
                len(self._news(ChangeStaged, change_id)) == self._num_ranks or bool(self._news(ChangeFailed, change_id))
            )
        )
        assert not self._news(ChangeFailed, change_id)
        return self._news(ChangeStaged, change_id)

    def wait_answers(self, change_id: int) -> dict[int, ChangeStaged | ChangeFailed]:
        """Of all ranks, by rank."""

        def answers() -> list[ChangeStaged | ChangeFailed]:
            return [*self._news(ChangeStaged, change_id), *self._news(ChangeFailed, change_id)]

        self._frontend.receive_until(lambda: len(answers()) == self._num_ranks)
        return {answer.rank: answer for answer in answers()}

    def commit(self, change_id: int, target: ExpertPlacement) -> list[ChangeCommitted]:
        """Have all leaders vote for a staged change; returns when every rank has committed it."""
        for dp_rank in range(self._frontend.dp_size):
            self._frontend.send(dp_rank, CommitChange(change_id=change_id))
        self._frontend.receive_until(lambda: len(self._news(ChangeCommitted, change_id)) == self._num_ranks)
        self.placement = target
        return self._news(ChangeCommitted, change_id)

    def drop(self, change_id: int) -> None:
        """As a frontend does with a change that it does not want any more."""
        for rank in range(self._num_ranks):
            self._tell(rank, AbortStaging(change_id=change_id))
        for dp_rank in range(self._frontend.dp_size):
            self._frontend.send(dp_rank, DropChange(change_id=change_id))

    def committed(self, change_id: int) -> bool:
        """Whether any rank has said so."""
        return bool(self._news(ChangeCommitted, change_id))

    def _hellos(self) -> dict[int, MigratorReady]:
        return {n.rank: n for n in self._frontend.heard_of_placement if isinstance(n, MigratorReady)}

    def _news(self, kind: type[NewsT], change_id: int) -> list[NewsT]:
        return [n for n in self._frontend.heard_of_placement if isinstance(n, kind) and n.change_id == change_id]

    def _tell(self, rank: int, message: ToMigrator) -> None:
        self._frontend.router.send_multipart([migrator_identity(rank), msgspec.msgpack.encode(message)])
