"""Migrations that go wrong: ranks that fail, never answer or answer late, and gains that do not come."""

from collections.abc import Callable

import pytest

from moeserve.testing.controlled_engine import (
    NUM_RANKS,
    OTHER_LE,
    SKEWED_LE,
    START,
    ControlledEngine,
)
from moeserve_placement.controller import Abort, ControllerSettings, PlacementController, Prepare


def test_a_load_that_reverts_at_once_is_rolled_back() -> None:
    engine = ControlledEngine.fitted(OTHER_LE)
    before = engine.table
    engine.serve(OTHER_LE, 8)
    assert not engine.acts
    engine.serve(SKEWED_LE, 8)
    assert [act.action for act in engine.acts] == ["migrate"]
    assert engine.table != before
    engine.serve(OTHER_LE, 5)
    migrated, back = engine.acts
    assert migrated.outcome.state == "rolled back"
    assert migrated.outcome.realised_share < 0.25 * migrated.prediction.gain_share
    assert (back.action, back.cause, back.outcome.state) == ("roll back", "no gain", "done")
    assert engine.table == before
    assert engine.controller.placement.epoch == 2
    held_s = engine.controller.status(engine.now_s).held_off_for_s
    assert held_s == pytest.approx(300.0, abs=5.0)
    engine.serve(SKEWED_LE, 100)
    assert len(engine.acts) == 2
    assert "held off" in engine.controller.decisions[-1].reason


def test_a_rank_that_never_acks_leaves_the_old_map() -> None:
    engine = ControlledEngine.started()
    engine.answers = False
    engine.serve(SKEWED_LE, 8)
    (prepare,) = engine.ordered(Prepare)
    for rank in (0, 1, 3):
        assert not engine.controller.ack(rank, prepare.epoch, "prepare", engine.now_s)
    stuck = engine.controller.status(engine.now_s + 20.0)
    assert (stuck.state, stuck.waiting_for_ranks, stuck.plan_id) == ("preparing", (2,), prepare.plan_id)
    assert stuck.plan_age_s == stuck.progress_age_s == 20.0
    assert 0 < stuck.deadline_in_s < 20.0
    assert not engine.controller.tick(prepare.deadline_s)
    (abort,) = engine.controller.tick(prepare.deadline_s + 0.1)
    assert isinstance(abort, Abort)
    assert abort.epoch == prepare.epoch
    assert "ranks 2" in abort.reason
    assert engine.controller.placement is START
    status = engine.controller.status(prepare.deadline_s + 0.1)
    assert (status.state, status.failures) == ("observing", {"prepare deadline": 1})
    assert status.held_off_for_s == pytest.approx(300.0)
    assert engine.acts[0].outcome.state == "aborted"


def test_hold_offs_double_until_a_migration_keeps_its_promise() -> None:
    engine = ControlledEngine.started(ControllerSettings(hold_off_s=10.0, max_hold_off_s=30.0))
    engine.answers = False
    held = []
    for _ in range(4):
        engine.now_s += 40.0
        engine.serve(SKEWED_LE, 9)
        epoch = engine.ordered(Prepare)[-1].epoch
        engine.obey(engine.controller.fail(1, "out of memory: 3 records", engine.now_s, epoch=epoch))
        held.append(engine.controller.status(engine.now_s).held_off_for_s)
    assert held == [10.0, 20.0, 30.0, 30.0]
    assert engine.controller.status(engine.now_s).failures == {"out of memory": 4}
    engine.answers = True
    engine.now_s += 40.0
    engine.serve(SKEWED_LE, 10)
    engine.answers = False
    engine.serve(OTHER_LE, 12)
    epoch = engine.ordered(Prepare)[-1].epoch
    engine.obey(engine.controller.fail(1, "out of memory", engine.now_s, epoch=epoch))
    assert engine.controller.status(engine.now_s).held_off_for_s == 10.0


def test_a_lost_rank_aborts_a_commit_that_no_rank_has_acked() -> None:
    engine = ControlledEngine.started()
    engine.answers = False
    engine.serve(SKEWED_LE, 8)
    commit = engine.prepared_by_all()
    (abort,) = engine.controller.fail(0, "connection lost", engine.now_s)
    assert isinstance(abort, Abort)
    assert engine.controller.placement is START
    # The ranks had agreed on it before they read the abort: what they hold is in force.
    assert not engine.controller.ack(1, commit.epoch, "commit", engine.now_s)
    assert engine.controller.placement.epoch == commit.epoch
    assert engine.controller.state == "committing"
    for rank in (0, 2, 3):
        engine.controller.ack(rank, commit.epoch, "commit", engine.now_s)
    assert engine.controller.state == "settling"
    assert engine.acts[0].outcome.state == "settling"


def test_a_commit_that_went_through_after_all_overtakes_the_next_migration() -> None:
    engine = ControlledEngine.started(ControllerSettings(hold_off_s=0.0))
    engine.answers = False
    engine.serve(SKEWED_LE, 8)
    commit = engine.prepared_by_all()
    engine.controller.fail(0, "connection lost", engine.now_s)
    engine.serve(SKEWED_LE, 1)
    begun = engine.ordered(Prepare)[-1]
    assert begun.epoch > commit.epoch
    (abort,) = engine.controller.ack(2, commit.epoch, "commit", engine.now_s)
    assert (abort.epoch, engine.controller.placement.epoch) == (begun.epoch, commit.epoch)
    assert [act.outcome.state for act in engine.acts] == ["aborted", "aborted"]


def test_after_one_ack_of_the_commit_nothing_takes_it_back() -> None:
    engine = ControlledEngine.started()
    engine.answers = False
    engine.serve(SKEWED_LE, 8)
    commit = engine.prepared_by_all()
    engine.controller.ack(3, commit.epoch, "commit", engine.now_s)
    assert not engine.controller.fail(0, "connection lost", engine.now_s)
    assert not engine.controller.tick(commit.deadline_s + 1.0)
    assert engine.controller.state == "settling"
    assert engine.controller.placement.epoch == commit.epoch
    assert engine.controller.status(commit.deadline_s + 1.0).failures == {"connection lost": 1, "commit deadline": 1}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (lambda controller, now_s: controller.ack(0, 1, "commit", now_s), "was not ordered"),
        (lambda controller, now_s: controller.ack(0, 2, "prepare", now_s), "never ordered"),
        (lambda controller, now_s: controller.ack(NUM_RANKS, 1, "prepare", now_s), "no rank 4"),
        (lambda controller, now_s: controller.fail(0, "lost", now_s, epoch=2), "never ordered"),
        (lambda controller, now_s: controller.tick(now_s - 1.0), "backwards"),
    ],
)
def test_messages_that_cannot_be_are_programming_errors(
    message: Callable[[PlacementController, float], object], words: str
) -> None:
    engine = ControlledEngine.started()
    engine.answers = False
    engine.serve(SKEWED_LE, 8)
    with pytest.raises(AssertionError, match=words):
        message(engine.controller, engine.now_s)


def test_a_gain_that_cannot_be_measured_keeps_the_new_map() -> None:
    engine = ControlledEngine.started()
    engine.serve(SKEWED_LE, 8)
    assert engine.controller.state == "settling"
    engine.serve(SKEWED_LE, 20, tokens=0)
    engine.obey(engine.controller.tick(engine.now_s + 1800.0))
    assert engine.acts[0].outcome.state == "unmeasured"
    assert engine.controller.state == "observing"
    assert engine.controller.placement.epoch == 1
