"""Changes on their way through the ranks: one at a time, staged by all, then committed by all or dropped.

A migration is the controller's: its acks, failures and deadlines go there, and its orders come back. A new split of
the map in force is done for the controller once it has decided on it, so it is seen through here: staged, committed,
and tried again where it fails, until another split or map takes its place.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from moeserve.engine.placement_messages import (
    AbortStaging,
    CommitChange,
    DropChange,
    MoveOrder,
    StageChange,
    ToMigrator,
    pack_array,
)
from moeserve.server.placement.ranks import Life
from moeserve_placement.controller import Abort, Command, Commit, ControllerSettings, InForce, Prepare, UpdateSplit
from moeserve_placement.moves import Moves
from moeserve_placement.placement import ExpertPlacement

logger = logging.getLogger(__name__)

Kind = Literal["migration", "split"]
Stage = Literal["stage", "commit"]
SPLIT_RETRY_S = 5.0


class RankSender(Protocol):
    """Where messages to the ranks go. Neither call waits."""

    def send_to_migrator(self, rank: int, message: ToMigrator) -> bool:
        """False where the rank cannot be reached."""
        ...

    def send_to_replicas(self, message: CommitChange | DropChange) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Change:
    change_id: int
    kind: Kind
    epoch: int
    """Of the placement it leads to."""
    num_moves: int
    started_s: float
    deadline_s: float
    waiting: set[int]
    stage: Stage = "stage"
    stage_since_s: float
    landed: bool = False
    """A rank has committed it, so all of them have or will at the same step."""

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """JSON types."""
        return {
            "change_id": self.change_id,
            "kind": self.kind,
            "epoch": self.epoch,
            "num_moves": self.num_moves,
            "stage": self.stage,
            "age_s": now_s - self.started_s,
            "waiting_for_ranks": sorted(self.waiting),
        }


class ChangeWatch(Protocol):
    """Is told what becomes of changes."""

    def stage_done(self, kind: Kind, stage: Stage, seconds: float) -> None: ...

    def landed(self, kind: Kind, num_moves: int) -> None: ...

    def copied(self, num_bytes: int) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class ChangeQueue:
    """Of one life of the ranks. `next_id` gives numbers that no other life used."""

    life: Life
    sender: RankSender
    settings: ControllerSettings
    watch: ChangeWatch
    next_id: Callable[[], int]
    current: Change | None = None
    split_failures: Counter[str] = field(default_factory=Counter)
    """By reason. Those of migrations are the controller's."""
    _withdrawn: Change | None = None
    """The last migration dropped after its commit was ordered: ranks may have agreed on it before."""
    _migration: Prepare | None = None
    """Waits for its turn."""
    _split: UpdateSplit | None = None
    """The split wanted, until it is in force."""
    _split_under_way: UpdateSplit | None = None
    _split_not_before_s: float = 0.0
    _lost: set[int] = field(default_factory=set)

    def obey(self, commands: list[Command], placement: ExpertPlacement, *, in_flight: bool, now_s: float) -> set[int]:
        """Carry out what the controller ordered, and begin what may begin; returns ranks that cannot be reached.

        placement: in force, as the controller knows. in_flight: it follows a migration.
        """
        for command in commands:
            match command:
                case Prepare():
                    self._migration = command
                case UpdateSplit():
                    self._split = command
                case Commit():
                    self._commit_migration(command, now_s)
                case Abort():
                    self._abort_migration(command)
        self._forget_what_is_over(placement, in_flight=in_flight)
        self._begin_next(placement, now_s)
        lost, self._lost = self._lost, set()
        return lost

    def staged(self, rank: int, change_id: int, num_bytes: int, now_s: float) -> int | None:
        """A rank has staged a change; returns the epoch of a migration, for the controller to hear of."""
        self.watch.copied(num_bytes)
        change = self.current
        if change is None or change.change_id != change_id or change.stage != "stage" or rank not in change.waiting:
            return None
        change.waiting.discard(rank)
        if not change.waiting:
            self.watch.stage_done(change.kind, "stage", now_s - change.stage_since_s)
        if change.kind == "migration":
            return change.epoch
        if not change.waiting:
            self._order_commit(change, now_s + self.settings.commit_timeout_s, now_s)
        return None

    def committed(self, rank: int, change_id: int, now_s: float) -> int | None:
        """A rank has committed a change; returns the epoch of a migration, for the controller to hear of."""
        change = self._find(change_id)
        if change is None or change.stage != "commit" or rank not in change.waiting:
            return None
        change.waiting.discard(rank)
        if not change.landed:
            change.landed = True
            logger.info("change %d (%s) is in force", change.change_id, change.kind)
            self.watch.landed(change.kind, change.num_moves)
        if not change.waiting:
            self.watch.stage_done(change.kind, "commit", now_s - change.stage_since_s)
        if change.kind == "migration":
            return change.epoch
        if not change.waiting:
            self._end_split()
        return None

    def failed(self, change_id: int, reason: str, now_s: float) -> int | None:
        """A rank cannot do what a change asks; returns the epoch of a migration, for the controller to hear of."""
        change = self._find(change_id)
        if change is None:
            return None
        if change.kind == "migration":
            return change.epoch
        self._fail_split(change, reason, now_s)
        return None

    def tick(self, now_s: float) -> None:
        """Let the deadline of a split pass; those of migrations are the controller's."""
        change = self.current
        if change is not None and change.kind == "split" and now_s > change.deadline_s:
            if change.landed:
                self._end_split()
            else:
                self._fail_split(change, f"{change.stage} deadline", now_s)

    def drop_all(self, reason: str) -> None:
        """Nothing more is going to be ordered: let the ranks free what they staged."""
        if self.current is not None and not self.current.landed:
            self._drop(self.current, reason)

    def _find(self, change_id: int) -> Change | None:
        """A change whose commit was ordered, or the current one."""
        for change in (self.current, self._withdrawn):
            if change is not None and change.change_id == change_id:
                return change
        return None

    def _commit_migration(self, command: Commit, now_s: float) -> None:
        change = self.current
        assert change is not None
        assert change.epoch == command.epoch
        self._order_commit(change, command.deadline_s, now_s)

    def _order_commit(self, change: Change, deadline_s: float, now_s: float) -> None:
        change.stage, change.stage_since_s, change.deadline_s = "commit", now_s, deadline_s
        change.waiting = set(range(self.life.num_ranks))
        self.sender.send_to_replicas(CommitChange(change_id=change.change_id))

    def _abort_migration(self, command: Abort) -> None:
        if self._migration is not None and self._migration.epoch == command.epoch:
            self._migration = None
        change = self.current
        if change is not None and change.kind == "migration" and change.epoch == command.epoch:
            self._drop(change, command.reason)
            if change.stage == "commit":
                self._withdrawn = change

    def _drop(self, change: Change, reason: str) -> None:
        logger.warning("change %d (%s) is dropped: %s", change.change_id, change.kind, reason)
        for rank in range(self.life.num_ranks):
            self.sender.send_to_migrator(rank, AbortStaging(change_id=change.change_id))
        self.sender.send_to_replicas(DropChange(change_id=change.change_id))
        self.current = None

    def _forget_what_is_over(self, placement: ExpertPlacement, *, in_flight: bool) -> None:
        change = self.current
        if change is not None and change.kind == "migration" and not in_flight:
            self.current = None
        if self._split is not None and self._split.epoch < placement.epoch:
            self._split = None
        # A withdrawn commit that went through after all leaves a split of the former map nothing to split.
        if change is not None and change.kind == "split" and change.epoch < placement.epoch:
            self._drop(change, "another map is in force")

    def _begin_next(self, placement: ExpertPlacement, now_s: float) -> None:
        if self.current is not None:
            return
        if self._migration is not None:
            command, self._migration = self._migration, None
            target = InForce(placement=command.placement, split_LP=command.split_LP)
            self._begin("migration", target, command.deadline_s, now_s, command.moves)
        elif self._split is not None and self._split.epoch == placement.epoch and now_s >= self._split_not_before_s:
            self._split_under_way = self._split
            target = InForce(placement=placement, split_LP=self._split.split_LP)
            self._begin("split", target, now_s + self.settings.prepare_timeout_s, now_s)

    def _begin(self, kind: Kind, target: InForce, deadline_s: float, now_s: float, moves: Moves | None = None) -> None:
        placement = target.placement
        change = self.current = Change(
            change_id=self.next_id(),
            kind=kind,
            epoch=placement.epoch,
            num_moves=0 if moves is None else len(moves),
            started_s=now_s,
            stage_since_s=now_s,
            deadline_s=deadline_s,
            waiting=set(range(self.life.num_ranks)),
        )
        logger.info("change %d (%s, %d moves) is being staged", change.change_id, kind, change.num_moves)
        table = pack_array(placement.physical_to_logical_LP, "<i4")
        split = pack_array(target.split_LP, "<f4")
        orders = self._orders_by_rank(moves)
        for rank in range(self.life.num_ranks):
            order = StageChange(
                change_id=change.change_id,
                epoch=change.epoch,
                placement=table,
                split=split,
                moves=orders[rank],
                record_addresses=list(self.life.record_addresses),
                bytes_per_s=self.settings.copy_bytes_per_s,
                timeout_s=max(deadline_s - now_s, 0.0),
            )
            if not self.sender.send_to_migrator(rank, order):
                self._lost.add(rank)
        if self._lost and kind == "split":
            self._fail_split(change, "rank unreachable", now_s)
            self._lost = set()

    def _orders_by_rank(self, moves: Moves | None) -> list[list[MoveOrder]]:
        """The copies each rank has to fetch."""
        orders: list[list[MoveOrder]] = [[] for _ in range(self.life.num_ranks)]
        rank_of_place = self.life.cluster.rank_of_place_P.tolist()
        # By columns: a first plan of a large model moves thousands, and the event loop waits.
        columns = () if moves is None else (moves.layer_M, moves.logical_M, moves.source_M, moves.destination_M)
        for layer, logical, source, destination in zip(*(column.tolist() for column in columns), strict=True):
            orders[rank_of_place[destination]].append(
                MoveOrder(
                    layer=layer,
                    logical_id=logical,
                    source_rank=rank_of_place[source],
                    source_physical_id=source,
                    destination_physical_id=destination,
                )
            )
        return orders

    def _end_split(self) -> None:
        if self._split is self._split_under_way:
            self._split = None
        self.current = self._split_under_way = None

    def _fail_split(self, change: Change, reason: str, now_s: float) -> None:
        """The split in force stays for now; the wanted one is tried again."""
        self._drop(change, reason)
        self._split_under_way = None
        self._split_not_before_s = now_s + SPLIT_RETRY_S
        self.split_failures[f"split: {reason.partition(':')[0]}"] += 1
