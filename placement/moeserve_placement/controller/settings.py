"""What the controller may spend and how sure it must be, as one value."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Raises ValueError for a value out of range."""

    num_windows: int = 4
    """Load windows that a plan is made on, that confirm it, and that its gain is measured over."""
    false_alarm: float = 1e-4
    """Most probability that chance alone makes any layer of a balanced placement look unbalanced in one decision."""
    expert_share: float = 0.5
    """Share of step time that the experts take, where the engine does not measure it."""
    horizon_s: float = 600.0
    """How long a load is expected to last: the time over which a gain must pay for its migration."""
    hysteresis: float = 2.0
    """A migration's gain over the horizon must be this many times its cost."""
    least_gain: float = 0.01
    """Share of step time that a migration must save."""
    rollback_below: float = 0.25
    """A migration that gains less than this share of what was predicted is rolled back."""
    hold_off_s: float = 300.0
    """Pause after a rollback or a failure; it doubles each time until a migration keeps its promise."""
    max_hold_off_s: float = 3600.0
    budget_bytes_per_s: float = 2.0**28
    """Bytes a second that migrations may copy in the long run, all ranks together."""
    burst_bytes: int = 2**38
    """The most that saved-up budget comes to. A plan takes at most half of it: the other half is the way back."""
    copy_bytes_per_s: float = 2.0**30
    """Bytes a second that one rank may send or receive while a migration runs."""
    interference: float = 0.1
    """Share of step time lost while copying, until a migration has measured it."""
    pause_s: float = 0.05
    """Step time lost to a commit, until one has measured it."""
    prepare_timeout_s: float = 30.0
    """Time to answer, over twice what the copies should take."""
    commit_timeout_s: float = 30.0
    settle_timeout_s: float = 1800.0
    """After so long without enough load to measure a gain, the migration is kept unmeasured."""
    max_decisions: int = 512
    """Decision records kept."""

    def __post_init__(self) -> None:
        above_zero = {"horizon_s", "hysteresis", "budget_bytes_per_s", "burst_bytes", "copy_bytes_per_s"}
        above_zero |= {"prepare_timeout_s", "commit_timeout_s", "settle_timeout_s"}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name in above_zero):
                raise ValueError(f"{name} must be {'above' if name in above_zero else 'at least'} 0, got {value}")
        if self.num_windows < 1 or self.max_decisions < 1:
            raise ValueError(
                f"num_windows and max_decisions must be at least 1, got {self.num_windows} and {self.max_decisions}"
            )
        if not 0.0 < self.false_alarm < 1.0 or not 0.0 < self.expert_share <= 1.0:
            raise ValueError(
                f"false_alarm must be in (0, 1) and expert_share in (0, 1], got {self.false_alarm} and "
                f"{self.expert_share}"
            )
        if self.max_hold_off_s < self.hold_off_s:
            raise ValueError(
                f"max_hold_off_s must be at least hold_off_s, got {self.max_hold_off_s} and {self.hold_off_s}"
            )
