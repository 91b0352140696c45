"""One migration under way: which ranks still have to answer, until when, and what they measured."""

from dataclasses import dataclass, field

from moeserve_placement.controller.assess import Candidate, InForce
from moeserve_placement.controller.commands import Measurements, Stage
from moeserve_placement.controller.decision import Action, Cause


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """From the order to prepare until every rank has acked the commit, or it is aborted."""

    decision: int
    plan_id: int
    action: Action
    cause: Cause
    candidate: Candidate
    before: InForce
    """In force when it was ordered."""
    started_s: float
    deadline_s: float
    waiting: set[int]
    stage: Stage = "prepare"
    landed: bool = False
    """A rank has acked the commit, so all have taken the target."""
    answers: list[Measurements] = field(default_factory=list)

    @property
    def target(self) -> InForce:
        return self.candidate.target

    @property
    def epoch(self) -> int:
        return self.target.placement.epoch

    def answer(self, rank: int, measurements: Measurements) -> bool:
        """Take an ack of the present stage; False where the rank had answered before."""
        if rank not in self.waiting:
            return False
        self.waiting.discard(rank)
        self.answers.append(measurements)
        return True
