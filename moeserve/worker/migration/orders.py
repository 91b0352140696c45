"""The frontend's order to stage a change, as values of this rank."""

import threading

import numpy as np

from moeserve.engine.placement_messages import StageChange, unpack_array
from moeserve.experts.migration.errors import StagingError
from moeserve.experts.migration.staging import ChangeOrder
from moeserve_placement import ExpertPlacement, PlacementError


def read_order(
    message: StageChange, current: ExpertPlacement, *, deadline: float, aborted: threading.Event
) -> ChangeOrder:
    """Raises StagingError for what is no placement at all; whether it can follow the current one is for the stager."""
    num_physical = current.num_physical_experts
    try:
        target = ExpertPlacement(
            physical_to_logical_LP=unpack_array(message.placement, "<i4", num_physical).astype(np.int64),
            num_logical_experts=current.num_logical_experts,
            num_ranks=current.num_ranks,
            epoch=message.epoch,
            num_physical_by_rank=current.num_physical_by_rank,
        )
        split_LP = unpack_array(message.split, "<f4", num_physical).astype(np.float64)
    except (PlacementError, ValueError) as error:
        raise StagingError(f"bad change: {error}") from error
    return ChangeOrder(
        change_id=message.change_id,
        target=target,
        split_LP=split_LP,
        source_rank_of={(move.layer, move.logical_id): move.source_rank for move in message.moves},
        record_addresses=message.record_addresses,
        bytes_per_s=message.bytes_per_s,
        deadline=deadline,
        aborted=aborted,
    )
