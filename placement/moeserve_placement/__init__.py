"""Expert placement: pure values and algorithms, without torch, clocks, sockets or threads."""

from moeserve_placement.cluster import Cluster
from moeserve_placement.constraints import Constraints, Pin
from moeserve_placement.cost import CostModel
from moeserve_placement.moves import ExpertMove, Moves
from moeserve_placement.placement import ExpertPlacement, PlacementError
from moeserve_placement.planner import Plan, fresh_placement, plan
from moeserve_placement.settings import POLICIES, PlanSettings, Policy

__all__ = [
    "POLICIES",
    "Cluster",
    "Constraints",
    "CostModel",
    "ExpertMove",
    "ExpertPlacement",
    "Moves",
    "Pin",
    "PlacementError",
    "Plan",
    "PlanSettings",
    "Policy",
    "fresh_placement",
    "plan",
]
