"""Where the controller stands: enough to see at a glance that it is stuck, and on whom."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["observing", "preparing", "committing", "settling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A snapshot of plain values."""

    state: State
    frozen: bool
    epoch: int
    plan_id: int | None
    """Of the migration under way or settling."""
    plan_age_s: float | None
    state_age_s: float
    progress_age_s: float
    """Since anything moved on: an ack, a window, a change of state."""
    deadline_in_s: float | None
    waiting_for_ranks: tuple[int, ...]
    windows_missing: int
    """Before anything can be planned."""
    held_off_for_s: float
    budget_bytes: int
    num_migrations: int
    num_rollbacks: int
    num_splits: int
    failures: Mapping[str, int]
    """By reason."""
    last_reason: str
    """Of the newest decision."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
