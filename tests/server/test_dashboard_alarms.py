"""Alarms say what is wrong, once, and say nothing while all is well."""

from dataclasses import replace

import pytest

from moeserve.server.dashboard.alarms import STUCK_AFTER_S, find_alarms
from moeserve.server.dashboard.picture import (
    HealthPicture,
    LayoutPicture,
    Picture,
    PlacementPicture,
    Point,
    ReplicaPicture,
    TotalsPicture,
)

POINT = Point(
    time=0.0, generation_tokens_per_s=0.0, prompt_tokens_per_s=0.0, requests_per_s=0.0, running=0, waiting=0,
    kv_usage=0.0, balancedness=None, floor=None, epoch=None,
)  # fmt: skip
WELL = Picture(
    model="demo",
    version="0",
    uptime_s=1.0,
    health=HealthPicture(state="ready"),
    layout=LayoutPicture(dp_size=2, tp_size=1, num_ranks=2),
    replicas=[ReplicaPicture(dp_rank=0, is_ready=True), ReplicaPicture(dp_rank=1, is_ready=True)],
    totals=TotalsPicture(running=1, waiting=0, unfinished=1, max_unfinished=100, kv_usage=0.1),
    placement=PlacementPicture(state="observing", reason=""),
    point=POINT,
)


def alarms_of(picture: Picture) -> list[tuple[str, str]]:
    return [(alarm.id, alarm.severity) for alarm in find_alarms(picture)]


def test_a_server_that_is_well_has_none() -> None:
    assert alarms_of(WELL) == []


def test_a_replica_that_is_gone_is_critical_but_not_at_start() -> None:
    lost = replace(WELL, replicas=[ReplicaPicture(dp_rank=0, is_ready=True), ReplicaPicture(dp_rank=1, is_ready=False)])
    assert alarms_of(replace(lost, health=HealthPicture(state="lost"))) == [("ranks-lost", "critical")]
    assert alarms_of(replace(lost, health=HealthPicture(state="starting"))) == []


@pytest.mark.parametrize(
    ("state", "age_s", "is_stuck"),
    [
        ("preparing", STUCK_AFTER_S + 1, True),
        ("committing", STUCK_AFTER_S + 1, True),
        ("preparing", STUCK_AFTER_S - 1, False),
        ("observing", 3600.0, False),
    ],
)
def test_a_controller_is_stuck_only_where_it_works(state: str, age_s: float, is_stuck: bool) -> None:
    placement = PlacementPicture(state=state, reason="", progress_age_s=age_s)
    assert (alarms_of(replace(WELL, placement=placement)) == [("controller-stuck", "warning")]) == is_stuck


def test_the_worst_comes_first() -> None:
    full = TotalsPicture(running=0, waiting=0, unfinished=95, max_unfinished=100, kv_usage=0.0)
    lost = [ReplicaPicture(dp_rank=0, is_ready=False)]
    found = alarms_of(replace(WELL, totals=full, replicas=lost, health=HealthPicture(state="lost")))
    assert found == [("ranks-lost", "critical"), ("queue-full", "warning")]
