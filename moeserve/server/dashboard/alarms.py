"""What an operator must know at once. A pure function of what the page shows."""

from dataclasses import dataclass
from typing import Final, Literal

from moeserve.server.dashboard.picture import Picture, PlacementPicture

Severity = Literal["critical", "warning"]

STUCK_AFTER_S: Final = 60.0
"""Longer than any deadline of the controller for a stage: it should have given up by then."""
QUEUE_FULL_SHARE: Final = 0.9
_BUSY_STATES: Final = frozenset({"preparing", "committing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    id: str
    """The same as long as it is the same trouble."""
    severity: Severity
    text: str


def find_alarms(picture: Picture) -> list[Alarm]:
    """The worst first."""
    found = [*_lost_replicas(picture), *_queue(picture), *_controller(picture.placement)]
    return sorted(found, key=lambda alarm: alarm.severity != "critical")


def _lost_replicas(picture: Picture) -> list[Alarm]:
    lost = [replica.dp_rank for replica in picture.replicas if not replica.is_ready]
    if not lost or picture.health.state == "starting":
        return []
    names = ", ".join(str(dp_rank) for dp_rank in lost)
    text = f"Ranks are lost: replica {names} is not there. Requests wait and go on when the ranks are back."
    return [Alarm(id="ranks-lost", severity="critical", text=text)]


def _queue(picture: Picture) -> list[Alarm]:
    totals = picture.totals
    if totals.unfinished < QUEUE_FULL_SHARE * totals.max_unfinished:
        return []
    text = f"The queue is nearly full: {totals.unfinished} of {totals.max_unfinished} places are taken."
    return [Alarm(id="queue-full", severity="warning", text=text)]


def _controller(placement: PlacementPicture) -> list[Alarm]:
    if placement.state == "stopped":
        text = f"Online placement has stopped; the map in force stays: {placement.reason}"
        return [Alarm(id="placement-stopped", severity="warning", text=text)]
    age_s = placement.progress_age_s
    if placement.state in _BUSY_STATES and age_s is not None and age_s > STUCK_AFTER_S:
        text = (
            f"The placement controller is stuck: {placement.state} without progress for {age_s:.0f} s. "
            "Serving goes on with the map in force."
        )
        return [Alarm(id="controller-stuck", severity="warning", text=text)]
    return []
