"""Expert placement: pure values and algorithms, without torch, clocks, sockets or threads."""

from moeserve_placement.placement import ExpertPlacement, PlacementError

__all__ = ["ExpertPlacement", "PlacementError"]
