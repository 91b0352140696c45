"""Online placement as a state machine without I/O: events and times in, commands and decision records out.

    observing ──plan worth its bytes: Prepare──▶ preparing ──all ranks acked: Commit──▶ committing
        ▲  ▲                                         │                                      │  │
        │  └───failure, deadline, freeze: Abort──────┘◀──failure or deadline before any ack─┘  │
        │                                                      (Abort; the old map stays)      │
        │                                                                       first ack: the new map
        └──gain measured, or nothing to measure── settling ◀──all acked, or the deadline───────┘
                   no gain: a rollback is planned, and goes the same way back

| event | observing | preparing | committing | settling |
| --- | --- | --- | --- | --- |
| `observe` | plans, may start | new split at most | kept as evidence | counts towards the measurement |
| `tick` past the deadline | - | Abort | Abort, or done if a rank acked | kept, unmeasured |
| `ack` prepare | late, ignored | the last one: Commit | late, ignored | late, ignored |
| `ack` commit | see below | raises | first: new map in force | late, ignored |
| `fail` of a rank | late, ignored | Abort | Abort, or not waited for any more if a rank acked | late, ignored |
| `apply`, `rollback` | starts | refused | refused | starts; the measurement ends |
| `freeze` | | Abort | goes on: ranks may have switched | no rollback by itself |
| `restart` of all ranks | their map is in force | failed, too | failed, unless a rank acked | unmeasured |

Planning happens within the call that starts it. `frozen` is a flag beside the state: nothing is started then but what
an operator asks for by hand. Acks and failures of an epoch that is over are late and ignored; of an epoch never
ordered, from a rank that is none, or of a commit that was not ordered, they are a programming error and raise
AssertionError, as does time that runs backwards.

One late message counts: ranks that had agreed on a commit before its Abort reached them ack it all the same. Their map
is then in force, so the controller takes it, and aborts what it may have started since.

An order that is refused changes nothing, so no command is lost with the error: deadlines pass in the next call.

Epochs are never used twice, so a message of an aborted migration cannot be taken for one of the next.
"""

from collections.abc import Sequence
from dataclasses import replace

from moeserve_placement.arrays import FloatArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.constraints import Constraints, Pin
from moeserve_placement.controller.assess import Assessor, Balance, InForce, Verdict
from moeserve_placement.controller.commands import Command, Measurements, Stage, StepStatistics, UpdateSplit
from moeserve_placement.controller.decision import Cause, Decision
from moeserve_placement.controller.evidence import Evidence, Interval
from moeserve_placement.controller.migrations import Migrations
from moeserve_placement.controller.proposal import ControlError, Proposal
from moeserve_placement.controller.settings import ControllerSettings
from moeserve_placement.controller.status import State, Status
from moeserve_placement.load import LoadWindow
from moeserve_placement.placement import ExpertPlacement, PlacementError
from moeserve_placement.planner import check_cluster
from moeserve_placement.settings import PlanSettings, Policy

NOTHING_MEASURED = Measurements()


class PlacementController:
    """Decides when experts move, and sees each migration through. Times are the caller's, in seconds of one clock."""

    def __init__(
        self,
        settings: ControllerSettings,
        placement: ExpertPlacement,
        cluster: Cluster,
        plan_settings: PlanSettings,
        *,
        split_LP: FloatArray | None = None,
        now_s: float = 0.0,
    ) -> None:
        """plan_settings: policy `incremental`, or `frozen` to begin frozen. split_LP: the split in force; None: even.

        Raises ValueError for another policy, PlacementError where placement, cluster and constraints do not fit.
        """
        if plan_settings.policy not in ("incremental", "frozen"):
            raise ValueError(f"a controller's policy must be incremental or frozen, got {plan_settings.policy!r}")
        check_cluster(placement, cluster, plan_settings)
        in_force = InForce.evenly(placement) if split_LP is None else InForce(placement=placement, split_LP=split_LP)
        self._assessor = Assessor(
            cluster=cluster, plan_settings=replace(plan_settings, policy="incremental"), settings=settings
        )
        self._evidence = Evidence(settings.num_windows)
        self._migrations = Migrations(
            in_force,
            cluster,
            settings,
            expert_bytes=plan_settings.expert_bytes,
            now_s=now_s,
        )
        self._frozen = plan_settings.policy == "frozen"
        self._ruled_epoch: int | None = None
        """The placement known to keep to all constraints."""
        self._proposal: Proposal | None = None

    @property
    def state(self) -> State:
        return self._migrations.state

    @property
    def placement(self) -> ExpertPlacement:
        """The placement in force."""
        return self._in_force.placement

    @property
    def split_LP(self) -> FloatArray:
        """The split in force."""
        return self._in_force.split_LP

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The newest records, oldest first."""
        return tuple(self._migrations.log)

    def observe(self, windows: Sequence[LoadWindow], steps: StepStatistics, now_s: float) -> list[Command]:
        """Take in what was served since the last time: one window a phase, of the same time, and the steps."""
        commands = self.tick(now_s)
        shape = (self.placement.num_layers, self.placement.num_logical_experts)
        assert windows
        assert all(window.expert_load_LE.shape == shape for window in windows)
        interval = Interval(windows=tuple(windows), steps=steps)
        self._evidence.add(interval)
        state = self.state
        if state != "committing":
            commands += self._resplit()
        if state in ("observing", "settling"):
            self._migrations.progress_s = now_s
            commands += self._settle(interval) if state == "settling" else self._decide()
        return commands

    def tick(self, now_s: float) -> list[Command]:
        """Let deadlines pass. Call it often: it costs nothing where none has."""
        return self._migrations.tick(now_s)

    def ack(
        self, rank: int, epoch: int, stage: Stage, now_s: float, measurements: Measurements = NOTHING_MEASURED
    ) -> list[Command]:
        """A rank has done what the stage asks."""
        return self._migrations.ack(rank, epoch, stage, now_s, measurements)

    def fail(self, rank: int, reason: str, now_s: float, *, epoch: int | None = None) -> list[Command]:
        """A rank cannot do what was asked of it.

        reason: what happened, then details after a colon; failures are counted by what happened. epoch: of the
        migration; None where the rank is lost altogether, which fails whatever is under way.
        """
        return self._migrations.fail(rank, reason, now_s, epoch)

    def restart(self, placement: ExpertPlacement, cluster: Cluster, now_s: float) -> None:
        """All ranks were started again, with this map and an even split.

        What was under way has failed. Loads, records, prices, budget, hold-off, freeze and pins stay, so the next
        window may bring a plan. Raises PlacementError where placement, cluster and constraints do not fit.
        """
        check_cluster(placement, cluster, self._assessor.plan_settings)
        self._migrations.restart(InForce.evenly(placement), cluster, now_s)
        self._assessor = replace(self._assessor, cluster=cluster)
        self._ruled_epoch = self._proposal = None

    def dry_run(self, now_s: float, policy: Policy = "incremental") -> Proposal:
        """What would be moved now, and whether it is worth it; another policy is asked for its map of the same load.

        Raises ControlError where that cannot be said.
        """
        self._refuse_in_flight("plan")
        interval = self._evidence.everything()
        if interval is None:
            raise ControlError("no load has been seen yet")
        balance = self._assessor.balance(interval, self._in_force)
        try:
            if policy == "incremental":
                _, verdict = self._verdict(balance, now_s)
            else:
                price = self._migrations.protocol.price
                verdict = self._assessor.by_policy(policy, self._evidence, self._in_force, price)
        except PlacementError as error:
            raise ControlError(str(error)) from error
        self._proposal = Proposal(
            plan_id=self._migrations.new_plan_id(),
            epoch=self.placement.epoch,
            time_s=now_s,
            worth=verdict.worth,
            reason=verdict.reason,
            load=balance.summary,
            candidate=verdict.candidate,
        )
        return self._proposal

    def apply(self, plan_id: int, now_s: float) -> list[Command]:
        """Order the newest proposal, worth it or not. Raises ControlError where it is stale or has nothing to move."""
        self._refuse_in_flight("apply a plan")
        proposal = self._proposal
        if proposal is None or proposal.plan_id != plan_id or proposal.epoch != self.placement.epoch:
            raise ControlError(f"plan {plan_id} is not the newest one for the placement in force: plan again")
        if proposal.candidate is None:
            raise ControlError(f"plan {plan_id} moves nothing: {proposal.reason}")
        self._refuse_over_budget(proposal.candidate.prediction.num_bytes, now_s)
        commands = self.tick(now_s)
        self._proposal = None
        reason = f"applied by hand: {proposal.reason}"
        return commands + self._migrations.start(
            "migrate", "operator", reason, proposal.candidate, plan_id=plan_id, seen=self._evidence.everything()
        )

    def rollback(self, now_s: float) -> list[Command]:
        """Go back to the placement before the last migration. Raises ControlError where there is none."""
        self._refuse_in_flight("roll back")
        if self._migrations.last is None:
            raise ControlError("there is no migration to roll back")
        candidate = self._migrations.way_back()
        self._refuse_over_budget(candidate.prediction.num_bytes, now_s)
        return self.tick(now_s) + self._migrations.start(
            "roll back", "operator", "rolled back by hand", candidate, seen=self._evidence.everything()
        )

    def freeze(self, now_s: float) -> list[Command]:
        """Start nothing by itself from now on; copies under way are dropped."""
        commands = self.tick(now_s)
        self._frozen = True
        return commands + (self._migrations.drop("frozen by hand") if self.state == "preparing" else [])

    def thaw(self, now_s: float) -> list[Command]:
        """Follow the load again."""
        self._frozen = False
        return self.tick(now_s)

    def set_pins(self, pins: Sequence[Pin], now_s: float) -> list[Command]:
        """Replace the pins; replicas that are not where they must be move with the next window.

        Raises PlacementError where the pins cannot hold.
        """
        settings = self._assessor.plan_settings
        constraints = replace(settings.constraints, pins=tuple(pins))
        constraints.check(
            num_layers=self.placement.num_layers,
            num_experts=self.placement.num_logical_experts,
            cluster=self._assessor.cluster,
        )
        self._assessor = replace(self._assessor, plan_settings=replace(settings, constraints=constraints))
        self._ruled_epoch = self._proposal = None
        return self.tick(now_s)

    def status(self, now_s: float) -> Status:
        """Where it stands."""
        return self._migrations.status(now_s, frozen=self._frozen, windows_missing=self._evidence.num_missing)

    @property
    def _in_force(self) -> InForce:
        return self._migrations.in_force

    def _resplit(self) -> list[Command]:
        """Share replicas anew where that helps beyond chance: it moves nothing."""
        newest = self._evidence.newest()
        assert newest is not None
        split_LP = None if self._frozen else self._assessor.better_split(newest, self._in_force)
        if split_LP is None:
            return []
        balance = self._assessor.balance(newest, self._in_force)
        self._migrations.change_split(split_LP, newest, balance)
        return [UpdateSplit(epoch=self.placement.epoch, split_LP=split_LP)]

    def _settle(self, interval: Interval) -> list[Command]:
        """Measure the gain of the last migration; where it does not come, go back."""
        failed = self._migrations.measure(interval, self._assessor)
        if failed is None or failed.cause != "gain" or self._frozen:
            return []
        self._migrations.undo = f"plan {failed.plan_id} did not gain"
        return self._go_back(self._migrations.undo, None)

    def _decide(self) -> list[Command]:
        """Start a migration, or record why not."""
        migrations, evidence = self._migrations, self._evidence.everything()
        assert evidence is not None
        balance = self._assessor.balance(evidence, self._in_force)
        left_s = migrations.hold_off.left_s(migrations.now_s)
        if self._frozen:
            return self._stay(Verdict(worth=False, reason="frozen"), balance)
        if left_s > 0:
            reason = f"held off for {left_s:.0f} s more: {migrations.hold_off.reason}"
            return self._stay(Verdict(worth=False, reason=reason), balance)
        if migrations.undo is not None:
            return self._go_back(migrations.undo, balance)
        try:
            cause, verdict = self._verdict(balance, migrations.now_s)
        except PlacementError as error:
            return self._stay(Verdict(worth=False, reason=str(error)), balance)
        if not verdict.worth or verdict.candidate is None:
            return self._stay(verdict, balance)
        return migrations.start("migrate", cause, verdict.reason, verdict.candidate, seen=evidence, balance=balance)

    def _verdict(self, balance: Balance, now_s: float) -> tuple[Cause, Verdict]:
        """What the rules demand, else what the load asks for. Raises PlacementError where a rule cannot be paid for."""
        price = self._migrations.protocol.price
        # What a plan leaves of the budget always pays for its rollback.
        budget_bytes = self._migrations.budget.available(now_s) // 2
        ruled = self._assessor.plan_settings.constraints == Constraints() or self._ruled_epoch == self.placement.epoch
        if not ruled:
            candidate = self._assessor.by_rules(self._evidence, self._in_force, price, budget_bytes)
            if candidate is not None:
                return "rules", Verdict(worth=True, reason="pins, spread or groups demand it", candidate=candidate)
            self._ruled_epoch = self.placement.epoch
        return "gain", self._assessor.migration(self._evidence, self._in_force, balance, price, budget_bytes)

    def _go_back(self, reason: str, balance: Balance | None) -> list[Command]:
        migrations = self._migrations
        candidate = migrations.way_back()
        num_bytes = candidate.prediction.num_bytes
        if num_bytes > migrations.budget.available(migrations.now_s):
            waits = f"{reason}; the way back waits for a budget of {num_bytes} bytes"
            return self._stay(Verdict(worth=False, reason=waits, candidate=candidate), balance)
        seen = self._evidence.everything()
        return migrations.start("roll back", "no gain", reason, candidate, seen=seen, balance=balance)

    def _stay(self, verdict: Verdict, balance: Balance | None) -> list[Command]:
        self._migrations.record(
            "none",
            verdict.reason,
            seen=self._evidence.everything(),
            balance=balance,
            prediction=None if verdict.candidate is None else verdict.candidate.prediction,
        )
        return []

    def _refuse_in_flight(self, what: str) -> None:
        flight = self._migrations.flight
        if flight is not None:
            raise ControlError(f"cannot {what} while plan {flight.plan_id} is under way ({self.state})")

    def _refuse_over_budget(self, num_bytes: int, now_s: float) -> None:
        available = self._migrations.budget.available(now_s)
        if num_bytes > available:
            raise ControlError(f"it copies {num_bytes} bytes, the budget has {available} now")
