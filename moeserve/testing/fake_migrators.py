"""The ranks of an engine as the frontend's placement sees them: migrators and replica leaders, over real sockets.

They hold a map and a split, but no experts: a change is staged at once, and committed by all when every leader was told
to. Tests take hold of `on_stage` and `obeys_commits` to make them fail or fall silent.
"""

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from moeserve.engine.messages import ReplicaReady, ToFrontend, ToReplica, replica_identity
from moeserve.engine.placement_messages import (
    AbortStaging,
    ChangeCommitted,
    ChangeFailed,
    ChangeStaged,
    CommitChange,
    DropChange,
    FromMigrator,
    LoadReport,
    MigratorReady,
    PlacementShape,
    StageChange,
    ToMigrator,
    migrator_identity,
    pack_array,
    unpack_array,
)
from moeserve.ids import DpRank
from moeserve_placement import ExpertPlacement
from moeserve_placement.arrays import FloatArray, IntArray

_POLL_MS = 5
_JOIN_TIMEOUT_S = 10.0
WINDOW_S = 0.01


@dataclass(frozen=True, slots=True)
class Held:
    """What the ranks serve with."""

    epoch: int
    table_LP: IntArray
    split_LP: FloatArray


class FakeMigrators:
    """All ranks of one engine in one thread. `on_stage` answers a StageChange of a rank; None: not at all."""

    def __init__(
        self, frontend_address: str, placement: ExpertPlacement, *, dp_size: int, num_spare_places: int = 1,
        expert_bytes: int = 2**20,
    ) -> None:  # fmt: skip
        num_layers, num_ranks = placement.num_layers, placement.num_ranks
        self.shape = PlacementShape(
            num_layers=num_layers,
            moe_layer_ids=[1 + 2 * row for row in range(num_layers)],
            num_logical_experts=placement.num_logical_experts,
            top_k=2,
            num_physical_by_rank=placement.num_physical_R.tolist(),
            node_of_rank=[0] * num_ranks,
            expert_bytes=expert_bytes,
            num_spare_places=num_spare_places,
        )
        share_LP = 1.0 / np.take_along_axis(placement.num_replicas_LE, placement.physical_to_logical_LP, axis=1)
        self.held = Held(placement.epoch, placement.physical_to_logical_LP, share_LP)
        self.on_stage: Callable[[int, StageChange], FromMigrator | None] = self.stage
        self.obeys_commits = True
        self.received: list[tuple[int, ToMigrator]] = []
        """By migrators, with their ranks."""
        self.error: BaseException | None = None
        self._address = frontend_address
        self._dp_size = dp_size
        self._num_ranks = num_ranks
        self._incarnation = uuid.uuid4().hex
        self._orders: dict[int, StageChange] = {}
        self._votes: dict[int, set[int]] = {}
        self._to_send: deque[tuple[int, FromMigrator]] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-migrators", daemon=True)

    @contextmanager
    def running(self) -> Iterator["FakeMigrators"]:
        """From here to the end of the block; raises what went wrong in the thread."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            self._thread.join(_JOIN_TIMEOUT_S)
        assert not self._thread.is_alive(), "the fake migrators did not stop"
        if self.error is not None:
            raise self.error

    def report(self, load_LE: IntArray, *, replicas: range | None = None) -> None:
        """One load window: a third of it prefill, from every replica alike, or from some of them."""
        prefill_LE = load_LE // 3
        num_tokens = int(load_LE[0].sum()) // self.shape.top_k
        for dp_rank in replicas or range(self._dp_size):
            message = LoadReport(
                dp_rank=dp_rank,
                start_s=0.0,
                end_s=WINDOW_S,
                num_steps=10,
                num_prefill_tokens=num_tokens // 3,
                num_decode_tokens=num_tokens - num_tokens // 3,
                step_s=0.8 * WINDOW_S,
                expert_s=0.4 * WINDOW_S,
                prefill_load=pack_array(prefill_LE, "<i8"),
                decode_load=pack_array(load_LE - prefill_LE, "<i8"),
            )
            self._to_send.append((dp_rank * (self._num_ranks // self._dp_size), message))

    def say(self, rank: int, message: FromMigrator) -> None:
        """Let the migrator of a rank send this."""
        self._to_send.append((rank, message))

    def stage(self, rank: int, order: StageChange) -> FromMigrator:
        """What a healthy rank answers: it checks that the moves lead from the map in force to the target."""
        table_LP = self.held.table_LP.copy()
        target_LP = unpack_array(order.placement, "<i4", table_LP.shape[1])
        for move in order.moves:
            if table_LP[move.layer, move.source_physical_id] != move.logical_id:
                return ChangeFailed(rank=rank, change_id=order.change_id, reason=f"bad change: {move} has no source")
        for move in order.moves:
            table_LP[move.layer, move.destination_physical_id] = move.logical_id
        first = sum(self.shape.num_physical_by_rank[:rank])
        mine = slice(first, first + self.shape.num_physical_by_rank[rank])
        if (table_LP[:, mine] != target_LP[:, mine]).any():
            return ChangeFailed(rank=rank, change_id=order.change_id, reason="bad change: moves and target differ")
        num_bytes = self.shape.expert_bytes * sum(move.source_rank != rank for move in order.moves)
        return ChangeStaged(rank=rank, change_id=order.change_id, num_bytes=num_bytes, copy_s=1e-3, lost_s=1e-4)

    def _run(self) -> None:
        try:
            with zmq.Context() as context:
                self._serve(context)
        except BaseException as error:  # noqa: BLE001 - handed to the owner, who raises it
            self.error = error

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        encode = msgspec.msgpack.Encoder().encode
        to_migrator = msgspec.msgpack.Decoder(ToMigrator)
        to_replica = msgspec.msgpack.Decoder(ToReplica)
        leaders = [self._connect(context, replica_identity(DpRank(dp_rank))) for dp_rank in range(self._dp_size)]
        migrators = [self._connect(context, migrator_identity(rank)) for rank in range(self._num_ranks)]
        poller = zmq.Poller()
        for peer in (*leaders, *migrators):
            poller.register(peer, zmq.POLLIN)
        for rank, migrator in enumerate(migrators):
            migrator.send(encode(self._ready(rank)))
        for dp_rank, leader in enumerate(leaders):
            leader.send(encode(self._replica_ready(DpRank(dp_rank))))
        while not self._stopping.is_set():
            ready = dict(poller.poll(_POLL_MS))
            for rank, migrator in enumerate(migrators):
                if migrator in ready:
                    self._take(rank, to_migrator.decode(migrator.recv()))
            for dp_rank, leader in enumerate(leaders):
                if leader in ready:
                    self._lead(dp_rank, to_replica.decode(leader.recv()))
            while self._to_send:
                rank, message = self._to_send.popleft()
                migrators[rank].send(encode(message))
        for peer in (*leaders, *migrators):
            peer.close(linger=0)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], identity: bytes) -> zmq.Socket[bytes]:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, identity)
        peer.connect(self._address)
        return peer

    def _take(self, rank: int, message: ToMigrator) -> None:
        self.received.append((rank, message))
        match message:
            case StageChange():
                self._orders[message.change_id] = message
                answer = self.on_stage(rank, message)
                if answer is not None:
                    self._to_send.append((rank, answer))
            case AbortStaging():
                pass

    def _lead(self, dp_rank: int, message: ToReplica) -> None:
        match message:
            case CommitChange(change_id=change_id) if self.obeys_commits:
                votes = self._votes.setdefault(change_id, set())
                votes.add(dp_rank)
                if len(votes) == self._dp_size:
                    self.commit(change_id)
            case DropChange(change_id=change_id):
                self._votes.pop(change_id, None)

    def commit(self, change_id: int) -> None:
        """All ranks take the change, and say so."""
        order = self._orders[change_id]
        num_places = self.held.table_LP.shape[1]
        self.held = Held(
            order.epoch,
            unpack_array(order.placement, "<i4", num_places).astype(np.int64),
            unpack_array(order.split, "<f4", num_places).astype(np.float64),
        )
        for rank in range(self._num_ranks):
            self._to_send.append((rank, ChangeCommitted(rank=rank, change_id=change_id, pause_s=1e-3)))

    def _ready(self, rank: int) -> MigratorReady:
        return MigratorReady(
            rank=rank,
            incarnation=f"{self._incarnation}-{rank}",
            record_address=f"127.0.0.1:{20_000 + rank}",
            shape=self.shape,
            placement=pack_array(self.held.table_LP, "<i4"),
            epoch=self.held.epoch,
        )

    def _replica_ready(self, dp_rank: DpRank) -> ToFrontend:
        return ReplicaReady(
            dp_rank=dp_rank, incarnation=self._incarnation, num_blocks=64, block_size=16, max_model_len=512
        )
