"""What the controller asks of the ranks, and what it is told: values that cross to whoever does the I/O."""

from dataclasses import dataclass
from typing import Literal

from moeserve_placement.arrays import FloatArray
from moeserve_placement.moves import Moves
from moeserve_placement.placement import ExpertPlacement

Stage = Literal["prepare", "commit"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepare:
    """Copy the records of the moves into spare memory, check them, and ack. What is in force stays so."""

    plan_id: int
    placement: ExpertPlacement
    """The target; its epoch names the migration in acks, commits and aborts."""
    split_LP: FloatArray
    """Takes force with the target."""
    moves: Moves
    deadline_s: float
    bytes_per_s: float
    """Most that one rank may send or receive a second."""

    @property
    def epoch(self) -> int:
        return self.placement.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Every rank holds its copies: take the target at one step boundary, all ranks at the same one, and ack.

    All ranks switch or none does: the ack of one is proof that all have.
    """

    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Drop the copies of this migration and free their memory; the placement in force stays.

    Withdraws a commit that has not been agreed on yet. One that has been is acked all the same, and stands.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateSplit:
    """Share replicas differently from the next step on. Void if another placement is in force by then."""

    epoch: int
    split_LP: FloatArray


Command = Prepare | Commit | Abort | UpdateSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """What the steps of a window took, all phases together."""

    num_steps: int
    num_tokens: int
    step_s: float
    """Seconds of all steps together."""
    expert_share: float | None = None
    """Share of them that the experts took, the wait for the slowest rank included; None: not measured."""

    def __post_init__(self) -> None:
        if self.num_steps < 0 or self.num_tokens < 0 or self.step_s < 0:
            raise ValueError(
                f"steps, tokens and seconds must be at least 0, got {self.num_steps}, {self.num_tokens} and "
                f"{self.step_s}"
            )
        if self.expert_share is not None and not 0.0 <= self.expert_share <= 1.0:
            raise ValueError(f"expert_share must be in [0, 1], got {self.expert_share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What a stage took on one rank."""

    num_bytes: int = 0
    """Bytes it received."""
    copy_s: float = 0.0
    lost_s: float = 0.0
    """Step time lost: slower steps while copying, or the pause of the commit."""
