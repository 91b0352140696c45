"""The controller against a model that knows only the rules: any order of loads, acks, failures, late and lost messages.

The model keeps what the ranks would hold: their map changes with the first ack of a commit, and never else.
"""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeserve.testing.expert_loads import PATIENT
from moeserve_placement import Cluster, ExpertPlacement, Pin, PlanSettings
from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.controller import (
    Abort,
    Command,
    Commit,
    ControlError,
    ControllerSettings,
    PlacementController,
    Prepare,
    StepStatistics,
    UpdateSplit,
)
from moeserve_placement.load import LoadWindow
from moeserve_placement.noise_floor import noise_floor
from moeserve_placement.split_lp import best_split

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS, NUM_REDUNDANT = 2, 8, 4, 4
CLUSTER = Cluster.uniform(num_ranks=NUM_RANKS, num_physical_experts=NUM_EXPERTS + NUM_REDUNDANT)
EXPERT_BYTES = 10
SETTINGS = ControllerSettings(
    num_windows=2,
    horizon_s=100.0,
    hold_off_s=5.0,
    max_hold_off_s=20.0,
    budget_bytes_per_s=4.0,
    burst_bytes=200,
    copy_bytes_per_s=100.0,
    prepare_timeout_s=8.0,
    commit_timeout_s=8.0,
    settle_timeout_s=30.0,
    max_decisions=1000,
)
SKEWS_E = {
    "flat": np.ones(NUM_EXPERTS),
    "front": np.array([9.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "back": np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 9.0]),
    "middle": np.array([1.0, 1.0, 1.0, 8.0, 8.0, 1.0, 1.0, 1.0]),
    "idle": np.zeros(NUM_EXPERTS),
}


@dataclass
class _Ordered:
    """A migration as the ranks know it."""

    prepare: Prepare
    acked: set[int]
    deadline_s: float
    committing: bool = False
    landed: bool = False


class Machine(RuleBasedStateMachine):
    @initialize(frozen=st.booleans(), max_incoming=st.sampled_from([None, 1, 2]))
    def begin(self, frozen: bool, max_incoming: int | None) -> None:
        self.now_s = 0.0
        self.rng = np.random.default_rng(0)
        self.start = ExpertPlacement.identity(
            num_layers=NUM_LAYERS,
            num_logical_experts=NUM_EXPERTS,
            num_ranks=NUM_RANKS,
            num_redundant_experts=NUM_REDUNDANT,
        )
        plan_settings = PlanSettings(
            expert_bytes=EXPERT_BYTES,
            policy="frozen" if frozen else "incremental",
            max_incoming_per_layer_rank=max_incoming,
        )
        self.max_changes = NUM_EXPERTS + NUM_REDUNDANT if max_incoming is None else max_incoming
        self.controller = PlacementController(SETTINGS, self.start, CLUSTER, plan_settings)
        self.frozen, self.by_hand = frozen, False
        self.in_force, self.previous = self.start, None
        self.ordered: _Ordered | None = None
        self.withdrawn: _Ordered | None = None
        self.old_epochs: list[int] = []
        self.windows: list[FloatArray] = []
        self.spent: list[tuple[float, int]] = []

    # What the ranks and the clock do.

    @rule(
        kinds=st.tuples(*[st.sampled_from(sorted(SKEWS_E))] * NUM_LAYERS),
        repeats=st.integers(1, 5),
        tokens=st.sampled_from([20, 5000]),
    )
    def observe(self, kinds: tuple[str, ...], repeats: int, tokens: int) -> None:
        for _ in range(repeats):
            shares = [SKEWS_E[kind] / max(SKEWS_E[kind].sum(), 1.0) for kind in kinds]
            # A flat layer carries the chance of its draw, an idle one nothing.
            load_LE = np.stack([self.rng.multinomial(tokens, share) if share.any() else share for share in shares])
            self.windows = [*self.windows, load_LE.astype(np.float64)][-2 * SETTINGS.num_windows :]
            window = LoadWindow(
                expert_load_LE=self.windows[-1], start_s=self.now_s, end_s=self.now_s + 1.0, num_tokens=tokens
            )
            self.now_s += 1.0
            steps = StepStatistics(num_steps=10, num_tokens=tokens, step_s=1.0)
            self.take(self.controller.observe([window], steps, self.now_s))

    @rule(kind=st.sampled_from(["front", "back", "middle"]))
    def follow_a_lasting_skew(self, kind: str) -> None:
        """Ranks that do all that is asked: most runs would not get so far by themselves."""
        self.wait(20.0)
        for _ in range(4):
            self.observe((kind, kind), 2, 5000)
            if self.ordered is not None:
                self.ack_everything()

    @rule(seconds=st.sampled_from([0.0, 0.5, 6.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.controller.tick(self.now_s))

    @precondition(lambda self: self.ordered is not None)
    @rule(ranks=st.sets(st.integers(0, NUM_RANKS - 1), min_size=1))
    def ack(self, ranks: set[int]) -> None:
        ordered = self.ordered
        stage = "commit" if ordered.committing else "prepare"
        for rank in sorted(ranks):
            if self.ordered is not ordered or ordered.committing != (stage == "commit"):
                return
            self.ack_once(ordered, rank, stage)

    @precondition(lambda self: self.ordered is not None)
    @rule(rank=st.integers(0, NUM_RANKS - 1), seconds=st.sampled_from([7.0, 9.0]))
    def commit_with_one_ack(self, rank: int, seconds: float) -> None:
        """One rank agrees and the others are late: enough for the map to change."""
        if not self.ordered.committing:
            self.ack(set(range(NUM_RANKS)))
        if self.ordered is not None:
            self.ack({rank})
        self.wait(seconds)

    @precondition(lambda self: self.ordered is not None)
    @rule()
    def ack_everything(self) -> None:
        self.ack(set(range(NUM_RANKS)))
        if self.ordered is not None:
            self.ack(set(range(NUM_RANKS)))

    def ack_once(self, ordered: _Ordered, rank: int, stage: str) -> None:
        ordered.acked.add(rank)
        if stage == "commit" and not ordered.landed:
            self.land(ordered)
        if stage == "commit" and len(ordered.acked) == NUM_RANKS:
            self.ordered = None
        self.take(self.controller.ack(rank, ordered.prepare.epoch, stage, self.now_s))

    @precondition(lambda self: self.ordered is not None)
    @rule(rank=st.integers(0, NUM_RANKS - 1), lost=st.booleans())
    def fail(self, rank: int, lost: bool) -> None:
        ordered = self.ordered
        if ordered.landed:
            # The map is in force: the rank is not waited for any more.
            ordered.acked.add(rank)
            if len(ordered.acked) == NUM_RANKS:
                self.ordered = None
        epoch = None if lost else ordered.prepare.epoch
        self.take(self.controller.fail(rank, "checksum: layer 1", self.now_s, epoch=epoch))

    @precondition(lambda self: self.old_epochs)
    @rule(data=st.data(), rank=st.integers(0, NUM_RANKS - 1), stage=st.sampled_from(["prepare", "commit"]))
    def late_message(self, data: st.DataObject, rank: int, stage: str) -> None:
        epoch = data.draw(st.sampled_from(self.old_epochs))
        if self.withdrawn is not None and stage == "commit" and epoch == self.withdrawn.prepare.epoch:
            return
        if self.ordered is not None and epoch == self.ordered.prepare.epoch:  # in force, but ranks are waited for still
            return
        self.wait(0.0)
        assert self.controller.ack(rank, epoch, stage, self.now_s) == []
        assert self.controller.fail(rank, "late", self.now_s, epoch=epoch) == []

    @precondition(lambda self: self.withdrawn is not None)
    @rule(rank=st.integers(0, NUM_RANKS - 1))
    def ack_of_a_withdrawn_commit(self, rank: int) -> None:
        self.wait(0.0)
        withdrawn, begun = self.withdrawn, self.ordered
        commands = self.controller.ack(rank, withdrawn.prepare.epoch, "commit", self.now_s)
        assert [type(command) for command in commands] == ([] if begun is None else [Abort])
        if begun is not None:
            assert commands[0].epoch == begun.prepare.epoch
            self.old_epochs.append(begun.prepare.epoch)
        withdrawn.acked, withdrawn.deadline_s = {rank}, self.now_s + SETTINGS.commit_timeout_s
        self.ordered = withdrawn
        self.land(withdrawn)

    @rule()
    def restart(self) -> None:
        """All ranks, with the map that they once started with: nothing that was under way reaches them."""
        self.wait(0.0)
        if self.ordered is not None and not self.ordered.landed:
            self.old_epochs.append(self.ordered.prepare.epoch)
        self.ordered = self.withdrawn = self.previous = None
        self.in_force = self.start
        self.controller.restart(self.start, CLUSTER, self.now_s)

    # What an operator does.

    @rule(frozen=st.sampled_from([False, False, False, True]))
    def freeze_or_thaw(self, frozen: bool) -> None:
        self.frozen = frozen
        self.take((self.controller.freeze if frozen else self.controller.thaw)(self.now_s))

    @rule(stale=st.booleans())
    def dry_run_and_apply(self, stale: bool) -> None:
        self.wait(0.0)
        try:
            proposal = self.controller.dry_run(self.now_s)
        except ControlError:
            assert self.ordered is not None or not self.windows
            return
        json.dumps(proposal.to_dict())
        self.apply(proposal.plan_id - stale, possible=not stale and proposal.candidate is not None)

    def apply(self, plan_id: int, *, possible: bool) -> None:
        self.by_hand = True
        if possible:
            self.take(self.controller.apply(plan_id, self.now_s))
            assert self.ordered is not None
        else:
            with pytest.raises(ControlError):
                self.controller.apply(plan_id, self.now_s)
        self.by_hand = False

    @rule()
    def roll_back(self) -> None:
        self.wait(0.0)
        refused = self.ordered is not None or self.previous is None
        self.by_hand = True
        try:
            self.take(self.controller.rollback(self.now_s))
            assert not refused
        except ControlError as error:
            # What an aborted way back has spent may be missing for the next.
            if not refused and "the budget has" not in str(error):
                raise
        self.by_hand = False

    @rule(expert=st.integers(0, NUM_EXPERTS - 1), rank=st.integers(0, NUM_RANKS - 1), pinned=st.booleans())
    def set_pins(self, expert: int, rank: int, pinned: bool) -> None:
        pins = [Pin(logical_expert_id=expert, rank=rank)] if pinned else []
        self.take(self.controller.set_pins(pins, self.now_s))

    # What must hold.

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Prepare):
                self.take_prepare(command)
            elif isinstance(command, Commit):
                assert self.ordered is not None
                assert command.epoch == self.ordered.prepare.epoch
                assert self.ordered.acked == set(range(NUM_RANKS))
                self.ordered.committing, self.ordered.acked = True, set()
                self.ordered.deadline_s = command.deadline_s
            elif isinstance(command, Abort):
                assert self.ordered is not None
                assert command.epoch == self.ordered.prepare.epoch
                assert not self.ordered.landed
                if self.ordered.committing:
                    self.withdrawn = self.ordered
                self.old_epochs.append(command.epoch)
                self.ordered = None
            else:
                assert isinstance(command, UpdateSplit)
                assert not self.frozen
                assert command.epoch == self.in_force.epoch
        if self.ordered is not None and self.now_s > self.ordered.deadline_s:
            # In force since a first ack: ranks that are late are not waited for. Otherwise it was aborted above.
            assert self.ordered.landed
            self.ordered = None

    def take_prepare(self, prepare: Prepare) -> None:
        assert self.ordered is None
        assert self.by_hand or not self.frozen
        assert prepare.epoch > max([self.in_force.epoch, *self.old_epochs])
        moved_LP = self.in_force.physical_to_logical_LP.copy()
        for move in prepare.moves:
            source = self.in_force.physical_to_logical_LP[move.layer, move.source_physical_id]
            assert source == move.logical_expert_id
            moved_LP[move.layer, move.destination_physical_id] = source
        target_LP = prepare.placement.physical_to_logical_LP
        assert ((moved_LP == target_LP) | (target_LP < 0)).all()
        changes_LR = (target_LP != self.in_force.physical_to_logical_LP).reshape(NUM_LAYERS, NUM_RANKS, -1).sum(axis=2)
        assert changes_LR.max() <= self.max_changes
        (decision,) = [each for each in self.controller.decisions if each.plan_id == prepare.plan_id]
        assert decision.time_s == self.now_s
        assert decision.epoch == self.in_force.epoch
        assert decision.outcome.state == "under way"
        if decision.action == "roll back":
            assert (target_LP == self.previous.physical_to_logical_LP).all()
        if decision.cause == "gain":
            self.check_floor(np.unique(prepare.moves.layer_M))
        self.spent.append((self.now_s, prepare.moves.num_bytes))
        self.ordered = _Ordered(prepare=prepare, acked=set(), deadline_s=prepare.deadline_s)

    def check_floor(self, layers: IntArray) -> None:
        """By linear programming: no split of the map in force brings a moved layer above the floor."""
        for layer in layers:
            load_E = np.sum(self.windows, axis=0)[layer]
            _, highest = best_split(self.in_force.physical_to_logical_LP[layer], load_E, CLUSTER)
            mean = load_E.sum() / NUM_RANKS
            assert mean / highest < noise_floor(mean, NUM_RANKS)

    def land(self, ordered: _Ordered) -> None:
        action = next(each.action for each in self.controller.decisions if each.plan_id == ordered.prepare.plan_id)
        self.previous = None if action == "roll back" else self.in_force
        self.in_force, ordered.landed = ordered.prepare.placement, True
        self.old_epochs.append(ordered.prepare.epoch)
        self.withdrawn = None

    @invariant()
    def in_force_is_what_ranks_hold(self) -> None:
        assert self.controller.placement.epoch == self.in_force.epoch
        assert (self.controller.placement.physical_to_logical_LP == self.in_force.physical_to_logical_LP).all()

    @invariant()
    def splits_add_up(self) -> None:
        split_LP, table_LP = self.controller.split_LP, self.in_force.physical_to_logical_LP
        for split_P, table_P in zip(split_LP, table_LP, strict=True):
            np.testing.assert_allclose(np.bincount(table_P[table_P >= 0], split_P[table_P >= 0]), 1.0, rtol=1e-6)

    @invariant()
    def state_says_what_is_under_way(self) -> None:
        status = self.controller.status(self.now_s)
        json.dumps(status.to_dict())
        if self.ordered is None:
            assert status.state in ("observing", "settling")
            assert status.waiting_for_ranks == ()
        else:
            assert status.state == ("committing" if self.ordered.committing else "preparing")
            assert set(status.waiting_for_ranks) == set(range(NUM_RANKS)) - self.ordered.acked

    @invariant()
    def the_budget_holds_over_every_interval(self) -> None:
        for first in range(len(self.spent)):
            for last in range(first, len(self.spent)):
                allowed = SETTINGS.burst_bytes + SETTINGS.budget_bytes_per_s * (
                    self.spent[last][0] - self.spent[first][0]
                )
                assert sum(num_bytes for _, num_bytes in self.spent[first : last + 1]) <= allowed + 1e-6

    @invariant()
    def records_are_numbered_and_plain(self) -> None:
        decisions = self.controller.decisions
        assert [decision.number for decision in decisions] == list(range(len(decisions)))
        json.dumps([decision.to_dict() for decision in decisions[-3:]])
        under_way = [each for each in decisions if each.outcome is not None and each.outcome.state == "under way"]
        assert len(under_way) <= 1


Machine.TestCase.settings = settings(PATIENT, max_examples=60, stateful_step_count=40)
TestController = Machine.TestCase
