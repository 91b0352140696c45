"""How one migration goes through all ranks or none: prepare, every ack, commit, every ack; else abort.

The part of the controller that knows ranks. It holds what is in force, at most one migration, and no opinion about
whether any is a good idea. The state table of `controller.py` says what each message does.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from moeserve_placement.cluster import Cluster
from moeserve_placement.controller.assess import InForce
from moeserve_placement.controller.commands import Abort, Command, Commit, Measurements, Prepare, Stage
from moeserve_placement.controller.flight import Flight
from moeserve_placement.controller.price import MigrationPrice
from moeserve_placement.controller.settings import ControllerSettings

RANKS_NAMED = 8
"""Ranks that a reason lists before it only counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ended:
    """A migration that is over."""

    flight: Flight
    aborted: str | None = None
    """Why it was; None: it went through."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What a message led to."""

    commands: list[Command] = field(default_factory=list)
    ended: tuple[Ended, ...] = ()
    moved: bool = False
    """Something went on, so nothing is stuck."""


class CommitProtocol:
    """Two stages over all ranks. Epochs are never used twice, so that late messages cannot be mistaken."""

    def __init__(self, in_force: InForce, cluster: Cluster, settings: ControllerSettings) -> None:
        self.in_force = in_force
        self.flight: Flight | None = None
        self.price = MigrationPrice.assumed(settings)
        self.failures: Counter[str] = Counter()
        self.next_epoch = in_force.placement.epoch + 1
        self._cluster = cluster
        self._settings = settings
        self._withdrawn: Flight | None = None
        """Aborted while its commit was ordered: should ranks have agreed on it before, it comes back."""

    def start(self, flight: Flight) -> Step:
        """Order the copies of a migration; its target has the next epoch."""
        assert self.flight is None
        assert flight.epoch == self.next_epoch
        self.next_epoch += 1
        self.flight = flight
        prepare = Prepare(
            plan_id=flight.plan_id,
            placement=flight.target.placement,
            split_LP=flight.target.split_LP,
            moves=flight.candidate.moves,
            deadline_s=flight.deadline_s,
            bytes_per_s=self._settings.copy_bytes_per_s,
        )
        return Step(commands=[prepare], moved=True)

    def tick(self, now_s: float) -> Step:
        flight = self.flight
        if flight is None or now_s <= flight.deadline_s:
            return Step()
        if not flight.landed:
            return self.abort(f"{flight.stage} deadline: no ack from {_named(flight.waiting)}")
        self.failures["commit deadline"] += 1
        return self._finish(flight)

    def ack(self, rank: int, epoch: int, stage: Stage, now_s: float, measurements: Measurements) -> Step:
        self._check(rank, epoch)
        before = Step()
        if self._withdrawn is not None and stage == "commit" and epoch == self._withdrawn.epoch:
            before = self._reinstate(self._withdrawn, now_s)
        flight = self.flight
        if flight is None or epoch != flight.epoch or (stage == "prepare" and flight.stage == "commit"):
            return Step()
        assert stage == flight.stage, f"rank {rank} acks a {stage} that was not ordered"
        if not flight.answer(rank, measurements):
            return Step()
        if flight.stage == "commit" and not flight.landed:
            flight.landed, self.in_force, self._withdrawn = True, flight.target, None
        if flight.waiting:
            return replace(before, moved=True)
        if flight.stage == "commit":
            return replace(before, ended=before.ended + self._finish(flight).ended, moved=True)
        return self._order_commit(flight, now_s)

    def fail(self, rank: int, reason: str, epoch: int | None) -> Step:
        """epoch: None where the rank is lost, and with it whatever is under way."""
        self._check(rank, 0 if epoch is None else epoch)
        flight = self.flight
        if flight is None or epoch not in (None, flight.epoch):
            return Step()
        if not flight.landed:
            return self.abort(f"{reason} (rank {rank})")
        self.failures[_kind(reason)] += 1
        flight.waiting.discard(rank)
        return Step(moved=True) if flight.waiting else self._finish(flight)

    def restart(self, in_force: InForce, cluster: Cluster, reason: str) -> Step:
        """All ranks were started again with what is in force now; nobody is left to obey the step's commands."""
        flight = self.flight
        step = Step() if flight is None else self._finish(flight) if flight.landed else self.abort(reason)
        self.in_force, self._withdrawn, self._cluster = in_force, None, cluster
        self.next_epoch = max(self.next_epoch, in_force.placement.epoch + 1)
        return step

    def abort(self, reason: str, *, is_failure: bool = True) -> Step:
        """Give up what is under way; what is in force stays."""
        flight = self.flight
        assert flight is not None
        assert not flight.landed
        self.flight = None
        if flight.stage == "commit":
            self._withdrawn = flight
        if is_failure:
            self.failures[_kind(reason)] += 1
        return Step(
            commands=[Abort(epoch=flight.epoch, reason=reason)],
            ended=(Ended(flight=flight, aborted=reason),),
            moved=True,
        )

    def _reinstate(self, withdrawn: Flight, now_s: float) -> Step:
        """Ranks had agreed on a commit before its abort reached them: it stands, and what was begun since does not."""
        step = Step() if self.flight is None else self.abort("overtaken: an earlier commit went through")
        self.flight = withdrawn
        withdrawn.deadline_s = now_s + self._settings.commit_timeout_s
        return step

    def _order_commit(self, flight: Flight, now_s: float) -> Step:
        self.price = self.price.after_copies(flight.answers)
        flight.stage, flight.deadline_s = "commit", now_s + self._settings.commit_timeout_s
        flight.waiting, flight.answers = set(range(self._cluster.num_ranks)), []
        return Step(commands=[Commit(epoch=flight.epoch, deadline_s=flight.deadline_s)], moved=True)

    def _finish(self, flight: Flight) -> Step:
        self.price = self.price.after_commit(flight.answers)
        self.flight = None
        return Step(ended=(Ended(flight=flight),), moved=True)

    def _check(self, rank: int, epoch: int) -> None:
        assert 0 <= rank < self._cluster.num_ranks, f"there is no rank {rank}"
        assert epoch < self.next_epoch, f"epoch {epoch} was never ordered"


def _kind(reason: str) -> str:
    """What failures are counted by: the words before details."""
    return reason.partition(":")[0].partition(" (rank")[0]


def _named(ranks: Collection[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks)[:RANKS_NAMED])
    more = len(ranks) - RANKS_NAMED
    return f"ranks {listed}" + (f" and {more} more" if more > 0 else "")
