"""What a replay of loads assumes: ranks, the placement to start from, and what plans and copies are made of."""

from dataclasses import dataclass, field, replace

from moeserve_placement.cluster import Cluster
from moeserve_placement.controller.settings import ControllerSettings
from moeserve_placement.placement import ExpertPlacement
from moeserve_placement.settings import PlanSettings, Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """What a replay assumes besides the loads. Raises ValueError for fewer than one window between plans."""

    start: ExpertPlacement
    cluster: Cluster
    plan_settings: PlanSettings = field(default_factory=PlanSettings)
    """Its policy is what is replayed."""
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    """For every policy: windows planned on, and what copying costs."""
    replan_windows: int = 8
    """Windows between two plans of an EPLB policy."""

    def __post_init__(self) -> None:
        if self.replan_windows < 1:
            raise ValueError(f"replan_windows must be at least 1, got {self.replan_windows}")

    @staticmethod
    def in_order(
        *, num_layers: int, num_experts: int, num_ranks: int, num_nodes: int = 1, places_per_rank: int | None = None
    ) -> "Scenario":
        """Experts in order on equal ranks, as a server without a saved placement starts.

        places_per_rank: None is one redundant expert on each rank. Raises PlacementError where they do not fit.
        """
        needed = -(-num_experts // num_ranks)
        per_rank = min(needed + 1, num_experts) if places_per_rank is None else places_per_rank
        start = ExpertPlacement.identity(
            num_layers=num_layers,
            num_logical_experts=num_experts,
            num_ranks=num_ranks,
            num_redundant_experts=per_rank * num_ranks - num_experts,
        )
        return Scenario(start=start, cluster=Cluster.of(start, num_nodes=num_nodes))

    def with_policy(self, policy: Policy) -> "Scenario":
        return replace(self, plan_settings=replace(self.plan_settings, policy=policy))
