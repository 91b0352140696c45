"""What is seen of placement from outside: one immutable picture, renewed after everything that happens."""

from dataclasses import dataclass
from typing import Any

from moeserve.server.placement.ranks import Life
from moeserve_placement import ExpertPlacement, Pin
from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller import Decision, Status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """What the ranks hold. Rows of tables are MoE layers; operators see and send the model's own layer numbers."""

    life: Life
    placement: ExpertPlacement
    """In force."""
    split_LP: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementView:
    state: str
    """The controller's; or starting, static (never changes) or stopped (by an error)."""
    reason: str
    """Why it is starting, static or stopped; else that of the newest decision."""
    frozen: bool
    pins: tuple[Pin, ...]
    is_planning: bool
    failures: dict[str, int]
    """By reason, over all lives of the ranks."""
    num_windows_seen: int
    """Load windows that controllers have looked at."""
    known: Known | None
    """None before the ranks have come."""
    status: Status | None = None
    """None where no controller is at work."""
    decisions: tuple[Decision, ...] = ()
    """Oldest first."""
    change: dict[str, Any] | None = None
    """Under way through the ranks."""
