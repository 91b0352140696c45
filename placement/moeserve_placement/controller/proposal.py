"""A plan shown to an operator, who may order it by its number while the placement it starts from is in force."""

from dataclasses import asdict, dataclass
from typing import Any

from moeserve_placement.controller.assess import Candidate
from moeserve_placement.controller.decision import LoadSummary


class ControlError(ValueError):
    """What an operator asked for cannot be done now: says what and why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    plan_id: int
    epoch: int
    """Placement the moves start from."""
    time_s: float
    worth: bool
    """The controller would order it itself."""
    reason: str
    load: LoadSummary
    candidate: Candidate | None
    """None where nothing would move."""

    def to_dict(self) -> dict[str, Any]:
        """JSON types; `moves` lists every record to copy."""
        candidate = self.candidate
        return {
            "plan_id": self.plan_id,
            "epoch": self.epoch,
            "time_s": self.time_s,
            "worth": self.worth,
            "reason": self.reason,
            "load": asdict(self.load),
            "prediction": None if candidate is None else asdict(candidate.prediction),
            "moves": [] if candidate is None else candidate.moves.to_list(),
        }
