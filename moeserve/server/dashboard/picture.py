"""What the page shows of the server at one moment: plain values, encoded as they are.

Times are seconds; shares are from 0 to 1; None is "not known".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

HealthState = Literal["starting", "ready", "lost", "draining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPicture:
    state: HealthState
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPicture:
    dp_size: int
    tp_size: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPicture:
    """One DP replica, as of its last step."""

    dp_rank: int
    is_ready: bool
    report_age_s: float | None = None
    num_steps: int | None = None
    running: int | None = None
    waiting: int | None = None
    num_blocks: int | None = None
    free_blocks: int | None = None
    prefix_hit_rate: float | None = None
    """Share of the looked-up prompt tokens that were found, since the replica's start."""
    num_preemptions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsPicture:
    running: int
    waiting: int
    """In the replicas' queues."""
    unfinished: int
    """Sequences whose end somebody waits for."""
    max_unfinished: int
    kv_usage: float
    """Share of all KV blocks that requests hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPicture:
    state: str
    reason: str
    frozen: bool = False
    epoch: int | None = None
    balancedness: float | None = None
    """Mean over the layers; None before any load was seen."""
    worst: float | None = None
    worst_layer: int | None = None
    floor: float | None = None
    """Balancedness that chance allows."""
    rank_load: Sequence[float] = ()
    """Over the mean rank's."""
    progress_age_s: float | None = None
    change: Mapping[str, Any] | None = None
    """Under way through the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What the page draws over time."""

    time: float
    """Since 1970."""
    generation_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    running: int
    waiting: int
    kv_usage: float
    balancedness: float | None
    floor: float | None
    epoch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    model: str
    version: str
    uptime_s: float
    health: HealthPicture
    layout: LayoutPicture
    replicas: Sequence[ReplicaPicture]
    totals: TotalsPicture
    placement: PlacementPicture
    point: Point
