"""When experts move: a controller that decides and sees migrations through, without I/O."""

from moeserve_placement.controller.assess import Candidate, InForce
from moeserve_placement.controller.commands import (
    Abort,
    Command,
    Commit,
    Measurements,
    Prepare,
    Stage,
    StepStatistics,
    UpdateSplit,
)
from moeserve_placement.controller.controller import PlacementController
from moeserve_placement.controller.decision import Decision, LoadSummary, Outcome, Prediction
from moeserve_placement.controller.evidence import Interval, merge_intervals
from moeserve_placement.controller.proposal import ControlError, Proposal
from moeserve_placement.controller.settings import ControllerSettings
from moeserve_placement.controller.status import State, Status

__all__ = [
    "Abort",
    "Candidate",
    "Command",
    "Commit",
    "ControlError",
    "ControllerSettings",
    "Decision",
    "InForce",
    "Interval",
    "LoadSummary",
    "Measurements",
    "Outcome",
    "PlacementController",
    "Prediction",
    "Prepare",
    "Proposal",
    "Stage",
    "State",
    "Status",
    "StepStatistics",
    "UpdateSplit",
    "merge_intervals",
]
