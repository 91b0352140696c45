"""The server's settings of placement as the controller takes them."""

from moeserve.config import PlacementConfig
from moeserve.engine.placement_messages import PlacementShape
from moeserve_placement import Constraints, Pin, PlanSettings
from moeserve_placement.controller import ControllerSettings


def controller_settings(config: PlacementConfig, *, can_move: bool) -> ControllerSettings:
    """can_move: False leaves a byte budget too small for any record: splits follow the load, maps do not."""
    defaults = ControllerSettings()
    return ControllerSettings(
        num_windows=config.num_windows,
        horizon_s=config.horizon_s,
        hysteresis=config.hysteresis,
        least_gain=config.least_gain,
        hold_off_s=config.hold_off_s,
        max_hold_off_s=max(config.hold_off_s, defaults.max_hold_off_s),
        budget_bytes_per_s=config.budget_bytes_per_s,
        burst_bytes=defaults.burst_bytes if can_move else 1,
        copy_bytes_per_s=config.copy_bytes_per_s,
    )


def plan_settings(shape: PlacementShape, *, frozen: bool, pins: tuple[Pin, ...]) -> PlanSettings:
    """A plan brings no more experts of a layer to a rank than there are spare places for."""
    return PlanSettings(
        policy="frozen" if frozen else "incremental",
        constraints=Constraints(pins=pins),
        expert_bytes=shape.expert_bytes,
        max_incoming_per_layer_rank=shape.num_spare_places or None,
    )
