"""What frontend and ranks say to each other about expert placement: tagged msgspec structs, encoded as msgpack.

Every rank connects a DEALER socket with the identity `migrator_identity(rank)` to the frontend's ROUTER socket, besides
the one of its replica. A *change* is a target map and split that every rank stages, and that all commit at one step or
none ever does. One change is under way at a time; a change without moves updates the split alone.

    frontend                     migrator of every rank                replica leaders (by their own sockets)
      StageChange   ------------>  copies, checks
                    <------------  ChangeStaged | ChangeFailed          exactly one of them for each StageChange
      all staged: CommitChange  ------------------------------------->  vote in every step until it is committed
                    <------------  ChangeCommitted
      else: AbortStaging ------->  stops copying (says ChangeFailed)
            and DropChange  ----------------------------------------->  withdraw: from here on it is never committed

The leaders' answer to DropChange is the fate of the change: a ChangeCommitted that was under way already, or silence.
Arrays travel as bytes: little-endian, C order. Axes: L MoE layers, E logical experts, P physical experts of the group.
"""

import msgspec
import numpy as np
import numpy.typing as npt

_IDENTITY_PREFIX = b"migrator-"


class MoveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Copy one expert record to the rank that gets this order."""

    layer: int
    """Index among the MoE layers."""
    logical_id: int
    source_rank: int
    source_physical_id: int
    destination_physical_id: int


class StageChange(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """Bring the target about in spare places; what is in force stays so."""

    change_id: int
    """Counted up, from 1."""
    epoch: int
    """Of the target; that of the placement in force where only the split changes."""
    placement: bytes
    """int32 [L, P], physical to logical; -1 is an empty place."""
    split: bytes
    """float32 [L, P], share of its logical expert's tokens that each place takes."""
    moves: list[MoveOrder]
    """Those that end on this rank."""
    record_addresses: list[str]
    """Of every rank, from its MigratorReady."""
    bytes_per_s: float
    """Most that one rank may send or receive a second."""
    timeout_s: float
    """Counted from the message's arrival: no ChangeStaged by then is a ChangeFailed."""


class AbortStaging(msgspec.Struct, frozen=True, kw_only=True, tag="abort_staging"):
    """Stop copying and free the spare places. Ignored by a rank that has staged the change: DropChange frees it."""

    change_id: int


class PlacementShape(msgspec.Struct, frozen=True, kw_only=True):
    """What planning must know of the ranks and the model; the same from every rank."""

    num_layers: int
    moe_layer_ids: list[int]
    """The model's layer number of each MoE layer."""
    num_logical_experts: int
    top_k: int
    num_physical_by_rank: list[int]
    node_of_rank: list[int]
    expert_bytes: int
    """Of the largest expert record."""
    num_spare_places: int
    """In each layer of each rank; 0: only the split can change."""


class MigratorReady(msgspec.Struct, frozen=True, kw_only=True, tag="migrator_ready"):
    """First message of a rank's life, with the placement it started with; a new incarnation has started again."""

    rank: int
    incarnation: str
    record_address: str
    """Where peers fetch expert records: host:port."""
    shape: PlacementShape
    placement: bytes
    """int32 [L, P]."""
    epoch: int


class ChangeStaged(msgspec.Struct, frozen=True, kw_only=True, tag="change_staged"):
    rank: int
    change_id: int
    num_bytes: int
    """Received from other ranks."""
    copy_s: float
    lost_s: float
    """CPU seconds that receiving took: the most that this rank's steps can have lost to it."""


class ChangeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="change_failed"):
    """Nothing is left of the change on this rank."""

    rank: int
    change_id: int
    reason: str
    """`what: details`; what is one of dead source, corrupt record, too late, no spare place, out of memory, aborted,
    bad change."""


class ChangeCommitted(msgspec.Struct, frozen=True, kw_only=True, tag="change_committed"):
    """The proof that every rank commits at the same step; theirs may come later."""

    rank: int
    change_id: int
    pause_s: float
    """What the commit added to its step."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """What the routers of one replica chose in a window of steps; from its tp_rank 0."""

    dp_rank: int
    start_s: float
    """Of the first step, Unix time."""
    end_s: float
    """Of the last step."""
    num_steps: int
    """With tokens of this replica or of another."""
    num_prefill_tokens: int
    num_decode_tokens: int
    step_s: float
    """Seconds of all steps together."""
    expert_s: float | None
    """Of them from dispatch to combine, waits for other ranks included; None: not measured (GPUs)."""
    prefill_load: bytes
    """int64 [L, E], routed (token, choice) pairs."""
    decode_load: bytes
    """int64 [L, E]."""


ToMigrator = StageChange | AbortStaging
FromMigrator = MigratorReady | ChangeStaged | ChangeFailed | ChangeCommitted | LoadReport


class CommitChange(msgspec.Struct, frozen=True, kw_only=True, tag="commit_change"):
    """To the leader of each replica, once every rank has staged the change; wakes an idle one."""

    change_id: int


class DropChange(msgspec.Struct, frozen=True, kw_only=True, tag="drop_change"):
    """To the leader of each replica: withdraw this change, and any before it; wakes an idle one."""

    change_id: int


def migrator_identity(rank: int) -> bytes:
    return _IDENTITY_PREFIX + b"%d" % rank


def migrator_rank(identity: bytes) -> int | None:
    """The rank of a migrator by its name on the frontend's ROUTER socket; None for any other peer."""
    digits = identity.removeprefix(_IDENTITY_PREFIX)
    return int(digits) if identity.startswith(_IDENTITY_PREFIX) and digits.isdigit() else None


def pack_array(array: npt.NDArray[np.generic], dtype: str) -> bytes:
    """The array as bytes; dtype: `<i4`, `<i8` or `<f4`."""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def unpack_array(data: bytes, dtype: str, num_columns: int) -> npt.NDArray[np.generic]:
    """The table [rows, num_columns] in the bytes, in memory of its own; ValueError where they are not one."""
    return np.frombuffer(data, dtype=dtype).reshape(-1, num_columns).copy()
