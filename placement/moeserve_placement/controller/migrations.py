"""Migrations once they are decided: order, follow through the ranks, measure, and the way back.

Keeps time, the byte budget, the hold-off and the records; decides nothing.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from moeserve_placement.arrays import FloatArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.controller.assess import Assessor, Balance, Candidate, InForce
from moeserve_placement.controller.budget import ByteBudget
from moeserve_placement.controller.commands import Command, Measurements, Stage
from moeserve_placement.controller.decision import Action, Cause, Decision, DecisionLog, Outcome, Prediction
from moeserve_placement.controller.evidence import Interval
from moeserve_placement.controller.flight import Flight
from moeserve_placement.controller.hold_off import HoldOff
from moeserve_placement.controller.protocol import CommitProtocol, Ended, Step
from moeserve_placement.controller.settings import ControllerSettings
from moeserve_placement.controller.settling import Settling
from moeserve_placement.controller.status import State, Status
from moeserve_placement.moves import moves_between

RESTARTED = "ranks started again"


class Migrations:
    """One migration at a time, from its order to the measurement of its gain."""

    def __init__(
        self, in_force: InForce, cluster: Cluster, settings: ControllerSettings, *, expert_bytes: int, now_s: float
    ) -> None:
        self.protocol = CommitProtocol(in_force, cluster, settings)
        self.budget = ByteBudget(bytes_per_s=settings.budget_bytes_per_s, burst_bytes=settings.burst_bytes, now_s=now_s)
        self.hold_off = HoldOff(first_s=settings.hold_off_s, most_s=settings.max_hold_off_s)
        self.log = DecisionLog(settings.max_decisions)
        self.counts: Counter[Action] = Counter()
        self.settling: Settling | None = None
        self.last: Flight | None = None
        """The committed migration that a rollback would undo."""
        self.undo: str | None = None
        """Why a rollback is due."""
        self.now_s = self.state_since_s = self.progress_s = now_s
        self._cluster = cluster
        self._settings = settings
        self._expert_bytes = expert_bytes
        self._next_plan_id = 0

    @property
    def in_force(self) -> InForce:
        return self.protocol.in_force

    @property
    def flight(self) -> Flight | None:
        return self.protocol.flight

    @property
    def state(self) -> State:
        if self.flight is not None:
            return "preparing" if self.flight.stage == "prepare" else "committing"
        return "observing" if self.settling is None else "settling"

    def tick(self, now_s: float) -> list[Command]:
        assert now_s >= self.now_s, f"time runs backwards: {now_s} after {self.now_s}"
        self.now_s = now_s
        if self.settling is not None and now_s > self.settling.deadline_s:
            self._end_settling("too little load to measure the gain")
        return self._follow(self.protocol.tick(now_s))

    def ack(self, rank: int, epoch: int, stage: Stage, now_s: float, measurements: Measurements) -> list[Command]:
        return self.tick(now_s) + self._follow(self.protocol.ack(rank, epoch, stage, now_s, measurements))

    def fail(self, rank: int, reason: str, now_s: float, epoch: int | None) -> list[Command]:
        return self.tick(now_s) + self._follow(self.protocol.fail(rank, reason, epoch))

    def start(
        self, action: Action, cause: Cause, reason: str, candidate: Candidate, *, plan_id: int | None = None,
        seen: Interval | None, balance: Balance | None = None,
    ) -> list[Command]:  # fmt: skip
        """Order a migration. plan_id: of the proposal it comes from. seen, balance: what it was decided on."""
        self._end_settling("another migration was ordered meanwhile")
        target, prediction = candidate.target, candidate.prediction
        placement = replace(target.placement, epoch=self.protocol.next_epoch)
        candidate = replace(candidate, target=replace(target, placement=placement))
        self.budget.spend(prediction.num_bytes, self.now_s)
        flight = Flight(
            decision=self.log.next_number,
            plan_id=self.new_plan_id() if plan_id is None else plan_id,
            action=action,
            cause=cause,
            candidate=candidate,
            before=self.in_force,
            started_s=self.now_s,
            deadline_s=self.now_s + self._settings.prepare_timeout_s + 2.0 * prediction.copy_s,
            waiting=set(range(self._cluster.num_ranks)),
        )
        self.record(action, reason, seen=seen, balance=balance, flight=flight)
        return self._follow(self.protocol.start(flight))

    def drop(self, reason: str) -> list[Command]:
        """Abort the copies under way, through no fault of anybody."""
        return self._follow(self.protocol.abort(reason, is_failure=False), is_failure=False)

    def restart(self, in_force: InForce, cluster: Cluster, now_s: float) -> None:
        """All ranks were started again with this map: what was under way has failed, what was learned stays."""
        self.tick(now_s)
        self._follow(self.protocol.restart(in_force, cluster, RESTARTED))
        self._end_settling(RESTARTED)
        self.last = self.undo = None
        self._cluster = cluster
        self.state_since_s = self.progress_s = now_s
        self.record("none", f"{RESTARTED}: they hold epoch {in_force.placement.epoch}", seen=None)

    def measure(self, interval: Interval, assessor: Assessor) -> Flight | None:
        """Count a window towards the gain of the migration that settles; returns one whose gain did not come."""
        settling = self.settling
        assert settling is not None
        settling.add(interval)
        if len(settling.intervals) < self._settings.num_windows:
            return None
        came, outcome = settling.realised(assessor, self.now_s)
        self.log.close(settling.flight.decision, outcome)
        self.settling = None
        self.state_since_s = self.now_s
        if came:
            self.hold_off.clear()
            return None
        return settling.flight

    def way_back(self) -> Candidate:
        """From the placement in force to the one before the last migration, exactly."""
        assert self.last is not None
        before, price = self.last.before, self.protocol.price
        moves = moves_between(self.in_force.placement, before.placement, self._cluster, expert_bytes=self._expert_bytes)
        prediction = Prediction(
            num_moves=len(moves),
            num_layers=int(np.unique(moves.layer_M).size),
            num_bytes=moves.num_bytes,
            copy_s=price.copy_s(moves, self._cluster),
            cost_s=price.cost_s(moves, self._cluster),
            gain_share=0.0,
            gain_s=0.0,
        )
        return Candidate(target=before, moves=moves, prediction=prediction)

    def record(
        self, action: Action, reason: str, *, seen: Interval | None, balance: Balance | None = None,
        prediction: Prediction | None = None, flight: Flight | None = None,
    ) -> None:  # fmt: skip
        """Write down a decision. flight: the migration it starts."""
        self.log.add(
            Decision(
                number=self.log.next_number,
                time_s=self.now_s,
                epoch=self.in_force.placement.epoch,
                phase="mixed" if seen is None else seen.phase,
                action=action,
                reason=reason,
                cause=None if flight is None else flight.cause,
                plan_id=None if flight is None else flight.plan_id,
                load=None if balance is None else balance.summary,
                prediction=prediction if flight is None else flight.candidate.prediction,
                outcome=None if flight is None else Outcome(state="under way", time_s=self.now_s),
            )
        )

    def change_split(self, split_LP: FloatArray, seen: Interval, balance: Balance) -> None:
        """Share replicas of the map in force differently from now on."""
        self.record("split", "the same map shares better under another split", seen=seen, balance=balance)
        self.protocol.in_force = replace(self.in_force, split_LP=split_LP)
        self.counts["split"] += 1

    def status(self, now_s: float, *, frozen: bool, windows_missing: int) -> Status:
        """A snapshot; what is not known here is passed in."""
        flight, settling = self.flight, self.settling
        shown = settling.flight if flight is None and settling is not None else flight
        deadlines = [stage.deadline_s for stage in (flight, settling) if stage is not None]
        return Status(
            state=self.state,
            frozen=frozen,
            epoch=self.in_force.placement.epoch,
            plan_id=None if shown is None else shown.plan_id,
            plan_age_s=None if shown is None else now_s - shown.started_s,
            state_age_s=now_s - self.state_since_s,
            progress_age_s=now_s - self.progress_s,
            deadline_in_s=deadlines[0] - now_s if deadlines else None,
            waiting_for_ranks=() if flight is None else tuple(sorted(flight.waiting)),
            windows_missing=windows_missing,
            held_off_for_s=self.hold_off.left_s(now_s),
            budget_bytes=self.budget.available(now_s),
            num_migrations=self.counts["migrate"],
            num_rollbacks=self.counts["roll back"],
            num_splits=self.counts["split"],
            failures=dict(self.protocol.failures),
            last_reason=self.log.last_reason,
        )

    def new_plan_id(self) -> int:
        self._next_plan_id += 1
        return self._next_plan_id - 1

    def _follow(self, step: Step, *, is_failure: bool = True) -> list[Command]:
        """Keep the books of what the protocol did."""
        if step.moved:
            self.progress_s = self.now_s
        for ended in step.ended:
            self._close(ended, is_failure=is_failure)
        if step.commands or step.ended:
            self.state_since_s = self.now_s
        return step.commands

    def _close(self, ended: Ended, *, is_failure: bool) -> None:
        flight, now_s = ended.flight, self.now_s
        if ended.aborted is not None:
            self.log.close(flight.decision, Outcome(state="aborted", time_s=now_s, reason=ended.aborted))
            if is_failure:
                self.hold_off.miss(now_s, ended.aborted)
            return
        self.counts[flight.action] += 1
        self.undo = None
        if flight.action == "roll back":
            assert self.last is not None
            self.log.close(flight.decision, Outcome(state="done", time_s=now_s))
            self.log.roll_back(self.last.decision, now_s)
            self.last = None
            self.hold_off.miss(now_s, "a migration was rolled back")
            return
        self.last = flight
        self.log.close(flight.decision, Outcome(state="settling", time_s=now_s))
        self.settling = Settling(flight=flight, since_s=now_s, deadline_s=now_s + self._settings.settle_timeout_s)

    def _end_settling(self, reason: str) -> None:
        if self.settling is not None:
            outcome = Outcome(state="unmeasured", time_s=self.now_s, reason=reason)
            self.log.close(self.settling.flight.decision, outcome)
            self.settling = None
            self.state_since_s = self.now_s
