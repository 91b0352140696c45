"""What a plan may do and what it is judged by, as one value."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from moeserve_placement.constraints import Constraints
from moeserve_placement.cost import CostModel

Policy = Literal["incremental", "eplb-global", "eplb-hierarchical", "frozen"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Split = Literal["weighted", "even"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Raises ValueError for a value out of range."""

    policy: Policy = "incremental"
    """`incremental` starts from the map in force; the EPLB policies forget it; `frozen` changes nothing at all."""
    split: Split = "weighted"
    """`even`: replicas of an expert share its tokens equally, for a runtime that cannot weigh them."""
    goal: float = 0.995
    """Share of the best possible level that a layer's highest rank must reach for the layer to be left alone."""
    constraints: Constraints = field(default_factory=Constraints)
    cost: CostModel = field(default_factory=CostModel)
    expert_bytes: int = 1
    """Bytes of one expert record; 1 counts bytes in records."""
    budget_bytes: int | None = None
    """The most a plan may move; None is no limit. EPLB policies keep to none."""
    max_incoming_per_layer_rank: int | None = None
    """The most places of a rank that a plan changes in a layer, for a runtime that copies into as many spare ones; None
    is no limit. What does not fit comes with the next plan. EPLB policies keep to none."""
    num_physical_by_layer: tuple[int, ...] | None = None
    """Physical experts each layer may use, from `physical_by_layer`; None is every place."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.split not in get_args(Split):
            raise ValueError(f"split must be one of {', '.join(get_args(Split))}, got {self.split!r}")
        if not 0.0 < self.goal <= 1.0:
            raise ValueError(f"goal must be in (0, 1], got {self.goal}")
        if self.expert_bytes < 1 or (self.budget_bytes is not None and self.budget_bytes < 0):
            raise ValueError(
                f"expert_bytes must be at least 1 and budget_bytes at least 0, got {self.expert_bytes} and "
                f"{self.budget_bytes}"
            )
        if self.max_incoming_per_layer_rank is not None and self.max_incoming_per_layer_rank < 1:
            raise ValueError(
                f"max_incoming_per_layer_rank must be at least 1 or None, got {self.max_incoming_per_layer_rank}"
            )
