"""Bring a change about beside the steps: fetch the experts that come, check them, and build the next tables.

Axes: L MoE layers, P physical experts of the group.
"""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeserve.experts.migration.errors import StagingError
from moeserve.experts.migration.holdings import Holdings
from moeserve.experts.migration.places import Arrival, RankPlaces
from moeserve.experts.migration.record_format import (
    RecordHeader,
    RecordRequest,
    checksum,
    receive_exactly,
    receive_frame,
    send_frame,
    unpack_record,
)
from moeserve.experts.placement_tables import PlacementTables
from moeserve_placement import ExpertPlacement

_POLL_S = 0.1
"""How soon an abort is noticed while nothing arrives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangeOrder:
    """A change as one rank must stage it."""

    change_id: int
    target: ExpertPlacement
    split_LP: npt.NDArray[np.float64]
    """Share of its logical expert's tokens that each physical expert takes."""
    source_rank_of: Mapping[tuple[int, int], int]
    """By (layer, logical expert), for the experts that come."""
    record_addresses: Sequence[str]
    """host:port of every rank's record server."""
    bytes_per_s: float
    deadline: float
    """By `time.monotonic`."""
    aborted: threading.Event

    def check(self) -> None:
        """Raises StagingError when there is no use in going on."""
        if self.aborted.is_set():
            raise StagingError("aborted: the change was withdrawn")
        if time.monotonic() > self.deadline:
            raise StagingError("too late: the experts had not all arrived by the deadline")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedChange:
    """Everything that takes force by the commit."""

    change_id: int
    places: RankPlaces
    tables: Sequence[PlacementTables]
    """Of each MoE layer."""
    num_bytes: int
    """Received."""


@torch.inference_mode()
def stage_change(order: ChangeOrder, holdings: Holdings, device: torch.device) -> StagedChange:
    """Fill the spare places. Raises StagingError; then what was written is in nobody's way."""
    current = holdings.places
    _check_change(order, current.placement)
    places, arrivals = current.change_to(order.target, holdings.num_places)
    num_bytes = sum(_fetch(order, arrival, holdings) for arrival in arrivals)
    tables = [
        PlacementTables.build(
            order.target,
            layer,
            rank=places.rank,
            device=device,
            place_of_local_p=places.place_of_local_Lp[layer],
            split_P=order.split_LP[layer],
        )
        for layer in range(order.target.num_layers)
    ]
    order.check()
    return StagedChange(change_id=order.change_id, places=places, tables=tables, num_bytes=num_bytes)


def _check_change(order: ChangeOrder, current: ExpertPlacement) -> None:
    target, split_LP = order.target, order.split_LP
    shape = current.physical_to_logical_LP.shape
    if target.physical_to_logical_LP.shape != shape or split_LP.shape != shape:
        raise StagingError(
            f"bad change: placement {target.physical_to_logical_LP.shape} and split {split_LP.shape} must be {shape}"
        )
    if not np.isfinite(split_LP).all() or (split_LP < 0).any():
        raise StagingError("bad change: the split must be finite numbers of at least 0")
    share_LE = np.zeros((target.num_layers, target.num_logical_experts + 1))
    layer_LP = np.arange(target.num_layers)[:, None]
    np.add.at(share_LE, (np.broadcast_to(layer_LP, shape), target.physical_to_logical_LP), split_LP)
    if (share_LE[:, :-1] <= 0).any():
        layer, expert = np.argwhere(share_LE[:, :-1] <= 0)[0]
        raise StagingError(f"bad change: the split gives no place a share of expert {expert} of layer {layer}")
    is_new = (target.physical_to_logical_LP != current.physical_to_logical_LP).any()
    # Epochs of migrations that came to nothing are left out.
    if not (target.epoch > current.epoch if is_new else target.epoch == current.epoch):
        raise StagingError(f"bad change: epoch {target.epoch} cannot follow epoch {current.epoch}")


def _fetch(order: ChangeOrder, arrival: Arrival, holdings: Holdings) -> int:
    """Copy one expert into its place; returns its bytes."""
    order.check()
    source = order.source_rank_of.get((arrival.layer, arrival.logical_id))
    name = f"expert {arrival.logical_id} of layer {arrival.layer}"
    if source is None or not 0 <= source < len(order.record_addresses):
        raise StagingError(f"bad change: nobody is to send {name}")
    store = holdings.stores[arrival.layer]
    request = RecordRequest(
        layer=arrival.layer,
        logical_id=arrival.logical_id,
        epoch=holdings.places.placement.epoch,
        bytes_per_s=order.bytes_per_s,
        timeout_s=max(0.0, order.deadline - time.monotonic()),
    )
    try:
        data = _receive_record(order, order.record_addresses[source], request, num_bytes=store.expert_bytes)
        store.write_expert(arrival.place, unpack_record(data, store.experts.shape))
    except OSError as error:
        raise StagingError(f"dead source: rank {source} for {name}: {error}") from error
    except _CorruptRecordError as error:
        raise StagingError(f"corrupt record: {name} from rank {source}: {error}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StagingError(f"out of memory: {name} of {store.expert_bytes} bytes: {error}") from error
    return len(data)


class _CorruptRecordError(Exception):
    """What arrived is not what was sent, or not what was asked for."""


def _receive_record(order: ChangeOrder, address: str, request: RecordRequest, *, num_bytes: int) -> bytearray:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=max(_POLL_S, request.timeout_s)) as connection:
        connection.settimeout(_POLL_S)
        send_frame(connection, request)
        header = receive_frame(connection, RecordHeader, order.check)
        if header.error:
            raise ConnectionError(header.error)
        if header.num_bytes != num_bytes:
            raise _CorruptRecordError(f"it has {header.num_bytes} bytes, not {num_bytes}")
        data = receive_exactly(connection, num_bytes, order.check)
    if checksum(data) != header.checksum:
        raise _CorruptRecordError(f"its checksum is {checksum(data):08x}, not {header.checksum:08x}")
    return data
