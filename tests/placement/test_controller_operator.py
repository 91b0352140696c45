"""What an operator does with a controller, and what it can be set to."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from moeserve.testing.controlled_engine import (
    EVEN_LE,
    NUM_LAYERS,
    OTHER_LE,
    PLAN,
    SKEWED_LE,
    START,
    ControlledEngine,
)
from moeserve_placement import Constraints, Pin, PlacementError, PlanSettings
from moeserve_placement.controller import Abort, ControlError, ControllerSettings, InForce, Prepare


def test_an_operator_plans_then_applies_while_frozen() -> None:
    engine = ControlledEngine.started(plan_settings=replace(PLAN, policy="frozen"))
    with pytest.raises(ControlError, match="no load"):
        engine.controller.dry_run(0.0)
    engine.serve(SKEWED_LE, 10)
    assert not engine.commands
    assert engine.controller.decisions[-1].reason == "frozen"
    proposal = engine.controller.dry_run(engine.now_s)
    assert proposal.worth
    assert len(proposal.to_dict()["moves"]) == proposal.candidate.prediction.num_moves
    newer = engine.controller.dry_run(engine.now_s)
    with pytest.raises(ControlError, match=f"plan {proposal.plan_id} is not the newest"):
        engine.controller.apply(proposal.plan_id, engine.now_s)
    engine.obey(engine.controller.apply(newer.plan_id, engine.now_s))
    assert engine.controller.placement.epoch == 1
    with pytest.raises(ControlError, match="plan again"):
        engine.controller.apply(newer.plan_id, engine.now_s)
    # What an operator ordered is measured, and stays even if it does not gain.
    engine.controller.thaw(engine.now_s)
    engine.serve(OTHER_LE, 4)
    assert engine.acts[0].outcome.state == "no gain"
    assert engine.acts[0].plan_id == newer.plan_id
    engine.obey(engine.controller.rollback(engine.now_s))
    assert engine.table == START.physical_to_logical_LP.tolist()
    with pytest.raises(ControlError, match="no migration to roll back"):
        engine.controller.rollback(engine.now_s)


def test_an_operator_orders_the_map_of_another_policy() -> None:
    engine = ControlledEngine.started(plan_settings=replace(PLAN, policy="frozen"))
    engine.serve(SKEWED_LE, 10)
    ours = engine.controller.dry_run(engine.now_s)
    proposal = engine.controller.dry_run(engine.now_s, "eplb-global")
    assert proposal.candidate.prediction.num_moves > ours.candidate.prediction.num_moves
    engine.obey(engine.controller.apply(proposal.plan_id, engine.now_s))
    assert engine.controller.placement.epoch == 1
    # It splits evenly, and plans the same map again from the same loads.
    in_force = InForce.evenly(engine.controller.placement)
    assert np.allclose(engine.controller.split_LP, in_force.split_LP)
    again = engine.controller.dry_run(engine.now_s, "eplb-global")
    assert (again.candidate, again.worth) == (None, False)
    assert "the map in force" in again.reason


@pytest.mark.parametrize(
    ("plan_settings", "words"),
    [
        (replace(PLAN, max_incoming_per_layer_rank=1), "more than 1 places of a rank"),
        (replace(PLAN, constraints=Constraints(pins=(Pin(logical_expert_id=0, rank=1),))), "pins"),
    ],
    ids=["too much at once", "rules that EPLB does not know"],
)
def test_another_policy_is_refused_where_its_map_cannot_be(plan_settings: PlanSettings, words: str) -> None:
    engine = ControlledEngine.started(plan_settings=replace(plan_settings, policy="frozen"))
    engine.serve(SKEWED_LE, 8)
    with pytest.raises(ControlError, match=words):
        engine.controller.dry_run(engine.now_s, "eplb-global")


def test_a_proposal_says_when_there_is_nothing_to_move() -> None:
    engine = ControlledEngine.fitted(SKEWED_LE)
    engine.serve(SKEWED_LE, 8)
    proposal = engine.controller.dry_run(engine.now_s)
    assert not proposal.worth
    with pytest.raises(ControlError, match="moves nothing"):
        engine.controller.apply(proposal.plan_id, engine.now_s)


def test_freezing_drops_copies_under_way_and_blames_nobody() -> None:
    engine = ControlledEngine.started()
    engine.answers = False
    engine.serve(SKEWED_LE, 8)
    with pytest.raises(ControlError, match="under way"):
        engine.controller.dry_run(engine.now_s)
    (abort,) = engine.controller.freeze(engine.now_s)
    assert isinstance(abort, Abort)
    status = engine.controller.status(engine.now_s)
    assert (status.frozen, status.failures, status.held_off_for_s) == (True, {}, 0.0)
    engine.controller.thaw(engine.now_s)
    engine.serve(SKEWED_LE, 1)
    assert engine.controller.state == "preparing"


@pytest.mark.parametrize("order", ["apply", "rollback"])
def test_an_order_refused_after_a_deadline_leaves_the_abort_to_the_next_tick(order: str) -> None:
    engine = ControlledEngine.started()
    engine.answers = False
    engine.serve(SKEWED_LE, 8)
    (prepare,) = engine.ordered(Prepare)
    late_s = prepare.deadline_s + 1.0
    give = partial(engine.controller.apply, 0) if order == "apply" else engine.controller.rollback
    with pytest.raises(ControlError, match="under way"):
        give(late_s)
    (abort,) = engine.controller.tick(late_s)
    assert isinstance(abort, Abort)
    assert abort.epoch == prepare.placement.epoch


def test_pins_are_obeyed_with_the_next_window_whatever_they_gain() -> None:
    engine = ControlledEngine.fitted(EVEN_LE)
    engine.serve(EVEN_LE, 2)
    engine.controller.set_pins([Pin(logical_expert_id=9, rank=0)], engine.now_s)
    engine.serve(EVEN_LE, 1)
    (act,) = engine.acts
    assert act.cause == "rules"
    for row in engine.table:
        assert 9 in row[:5]
    engine.serve(EVEN_LE, 10)
    assert len(engine.acts) == 1
    assert 1 <= act.prediction.num_moves <= 2 * NUM_LAYERS
    with pytest.raises(PlacementError, match=r"rank must be in \[0, 4\), got 7"):
        engine.controller.set_pins([Pin(logical_expert_id=9, rank=7)], engine.now_s)


def test_rules_that_the_first_map_breaks_are_put_right() -> None:
    spread = replace(PLAN, constraints=Constraints(pins=(Pin(logical_expert_id=15, rank=0, layer=1),)))
    engine = ControlledEngine.started(plan_settings=spread)
    engine.serve(EVEN_LE, 1)
    assert engine.acts[0].cause == "rules"
    assert 15 in engine.table[1][:5]


def test_old_records_make_room() -> None:
    engine = ControlledEngine.fitted(EVEN_LE, ControllerSettings(max_decisions=5))
    engine.serve(EVEN_LE, 12)
    assert [decision.number for decision in engine.controller.decisions] == list(range(7, 12))


@pytest.mark.parametrize("policy", ["eplb-global", "eplb-hierarchical"])
def test_policies_that_forget_the_map_are_refused(policy: str) -> None:
    with pytest.raises(ValueError, match=r"incremental or frozen, got 'eplb"):
        ControlledEngine.started(plan_settings=replace(PLAN, policy=policy))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_windows": 0}, "num_windows and max_decisions must be at least 1"),
        ({"false_alarm": 0.0}, r"false_alarm must be in \(0, 1\)"),
        ({"expert_share": 1.5}, r"expert_share in \(0, 1\]"),
        ({"horizon_s": 0.0}, "horizon_s must be above 0, got 0"),
        ({"interference": -0.1}, "interference must be at least 0, got -0.1"),
        ({"copy_bytes_per_s": float("nan")}, "copy_bytes_per_s must be above 0, got nan"),
        ({"max_hold_off_s": 1.0}, "max_hold_off_s must be at least hold_off_s"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ControllerSettings(**changes)
