"""The frontend's end of the engine: sends requests to replicas, and their outputs to whoever waits for them.

Owns the ROUTER socket and the journal. One task (`run`) reads; everything else returns at once. A replica that does
not answer costs nothing here: its requests stay in the journal and go on when the ranks are back.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from moeserve.config import ConfigError
from moeserve.engine.messages import (
    AbortRequests,
    AddRequest,
    ReplicaReady,
    StartWave,
    StepOutputs,
    ToFrontend,
    ToReplica,
    WaveStarted,
    replica_identity,
)
from moeserve.engine.outputs import FinishReason, RequestOutput
from moeserve.engine.placement_messages import (
    CommitChange,
    DropChange,
    FromMigrator,
    ToMigrator,
    migrator_identity,
    migrator_rank,
)
from moeserve.ids import DpRank, RequestId
from moeserve.observability.frontend_metrics import FrontendMetrics
from moeserve.server.engine_registry import EngineRegistry
from moeserve.server.errors import ApiError
from moeserve.server.journal import Journal, JournalEntry, OutputSink

logger = logging.getLogger(__name__)

_MAX_OUTPUT_WORK_TOKENS = 512
"""Outputs end where they like: beyond this many tokens, max_tokens says little about the work."""


class EngineClient:
    """Submits, aborts, resumes. Lives in one event loop; `clock` gives seconds."""

    def __init__(
        self,
        registry: EngineRegistry,
        metrics: FrontendMetrics,
        *,
        max_unfinished: int,
        clock: Callable[[], float],
        on_ready: Callable[[], None],
        on_migrator: Callable[[int, FromMigrator], None],
    ) -> None:
        """on_ready: called once, when all replicas are there. on_migrator: gets what the migrator of a rank says."""
        self._registry = registry
        self._metrics = metrics
        self._max_unfinished = max_unfinished
        self._clock = clock
        self._on_ready: Callable[[], None] | None = on_ready
        self._on_migrator = on_migrator
        self._journal = Journal()
        self._closing = False
        self.is_draining = False
        """Whether new requests are refused while those that are here run to their end."""
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._migrator_decoder = msgspec.msgpack.Decoder(FromMigrator)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # an unreachable replica is an error, not silence
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a restarted replica takes over its name

    @property
    def is_ready(self) -> bool:
        """Whether every replica is there, as far as is known (see `find_lost_replicas`)."""
        return self._registry.is_ready and not self._closing

    @property
    def num_unfinished(self) -> int:
        return len(self._journal)

    @property
    def max_unfinished(self) -> int:
        return self._max_unfinished

    @property
    def max_model_len(self) -> int | None:
        """What all replicas allow; None while none is there."""
        return self._registry.max_model_len

    def bind(self, address: str) -> None:
        """Open the socket for the replicas. Raises ConfigError when the port is taken."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"server.engine_port: cannot listen on {address}: {error}") from error

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Read what replicas and migrators say, until cancelled."""
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                self._receive(identity, b"".join(frames))
            except msgspec.MsgspecError as error:
                logger.error("dropped a message from %r that cannot be read: %s", identity, error)

    def submit(self, requests: Sequence[AddRequest], sink: OutputSink) -> None:
        """Start all of them, or none.

        Raises ApiError: 503 while replicas are missing or the server drains, 429 when there are too many.
        """
        if not self.is_ready:
            raise ApiError(503, "the engine is not ready", code="engine_not_ready", headers={"retry-after": "1"})
        if self.is_draining:
            raise ApiError(503, "the server is draining: it takes no new requests", code="draining")
        if len(self._journal) + len(requests) > self._max_unfinished:
            message = f"too many requests: {len(self._journal)} of {self._max_unfinished} places are taken"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        for request in requests:
            self._start(request, sink)

    def end(self, request_id: RequestId, reason: FinishReason) -> None:
        """Stop a request that the engine has not finished: its blocks are free after the replica's next step."""
        entry = self._forget(request_id)
        if entry is not None:
            self._count_end(entry, reason)
            self._send(entry.dp_rank, AbortRequests(request_ids=[request_id]))

    def find_lost_replicas(self) -> None:
        """Ask the socket about each replica: an abort of nothing is harmless, and fails where nobody is connected."""
        self._broadcast(AbortRequests(request_ids=[]))

    def send_to_migrator(self, rank: int, message: ToMigrator) -> bool:
        """To the migrator of one rank; False where it cannot be reached."""
        return self._send_frames(migrator_identity(rank), message) is None

    def send_to_replicas(self, message: CommitChange | DropChange) -> None:
        """To the leader of every replica."""
        self._broadcast(message)

    def fail_all(self, error: Exception) -> None:
        """The server ends: whoever still waits is told so, and nobody may come any more."""
        self._closing = True
        for entry in self._journal:
            self.end(entry.request.request_id, FinishReason.ERROR)
            entry.sink.fail(error)

    def _start(self, request: AddRequest, sink: OutputSink) -> None:
        dp_rank = self._registry.choose(request.prompt_token_ids, request.cache_salt)
        incarnation = self._registry.incarnation(dp_rank)
        assert incarnation is not None
        output_work = min(request.sampling_params.max_tokens, _MAX_OUTPUT_WORK_TOKENS)
        entry = JournalEntry(
            request=request,
            sink=sink,
            dp_rank=dp_rank,
            incarnation=incarnation,
            work_tokens=len(request.prompt_token_ids) + output_work,
            submitted_s=self._clock(),
        )
        self._registry.add_work(dp_rank, entry.work_tokens)
        self._journal.add(entry)
        self._send(dp_rank, request)

    def _receive(self, identity: bytes, frame: bytes) -> None:
        rank = migrator_rank(identity)
        if rank is not None:
            self._on_migrator(rank, self._migrator_decoder.decode(frame))
            return
        message = self._decoder.decode(frame)
        # A former life whose name was taken over keeps a connection with another name for a moment.
        if identity == replica_identity(message.dp_rank) and self._registry.knows(message.dp_rank):
            self._handle(message)

    def _handle(self, message: ReplicaReady | StepOutputs | WaveStarted) -> None:
        match message:
            case StepOutputs():
                self._dispatch(message)
            case WaveStarted():
                self._broadcast(StartWave(wave_id=message.wave_id), but=message.dp_rank)
            case ReplicaReady():
                self._registry.register(message)
                logger.info("replica %d is ready: %d blocks", message.dp_rank, message.num_blocks)
                if self._registry.is_ready:
                    self._resume_stale()
                    self._announce_ready()

    def _dispatch(self, message: StepOutputs) -> None:
        now = self._clock()
        self._registry.update_stats(message.dp_rank, message.stats, now)
        num_tokens = 0
        for output in message.outputs:
            entry = self._journal.get(output.request_id)
            if entry is None or entry.dp_rank != message.dp_rank:
                continue  # ended here before the replica knew
            num_tokens += len(output.new_token_ids)
            self._record_tokens(entry, output, now)
            if output.finish_reason is not None:
                self._forget(output.request_id)
                self._count_end(entry, output.finish_reason)
            entry.sink.put(output)
        self._metrics.generation_tokens.inc(num_tokens)

    def _record_tokens(self, entry: JournalEntry, output: RequestOutput, now: float) -> None:
        count = len(output.new_token_ids)
        if count == 0:
            return
        entry.output_token_ids.extend(output.new_token_ids)
        if entry.last_token_s is None:
            num_prompt_tokens = len(entry.request.prompt_token_ids)
            self._metrics.ttft_s.observe(now - entry.submitted_s)
            self._metrics.prompt_tokens.inc(num_prompt_tokens)
            self._registry.add_work(entry.dp_rank, -num_prompt_tokens)
            entry.work_tokens -= num_prompt_tokens
        else:
            for _ in range(count):
                self._metrics.itl_s.observe((now - entry.last_token_s) / count)
        entry.last_token_s = now

    def _forget(self, request_id: RequestId) -> JournalEntry | None:
        entry = self._journal.remove(request_id)
        if entry is not None:
            self._registry.add_work(entry.dp_rank, -entry.work_tokens)
        return entry

    def _count_end(self, entry: JournalEntry, reason: FinishReason) -> None:
        self._metrics.count_finished(reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._metrics.e2e_s.observe(self._clock() - entry.submitted_s)

    def _resume_stale(self) -> None:
        """Send again what only a former life of its replica knew.

        Not before all replicas are back: the first one to step needs its peers, and they hear of the wave from here.
        """
        for entry in self._journal:
            incarnation = self._registry.incarnation(entry.dp_rank)
            assert incarnation is not None
            if entry.incarnation != incarnation:
                entry.incarnation = incarnation
                self._metrics.resumed_requests.inc()
                self._send(entry.dp_rank, entry.continuation())

    def _announce_ready(self) -> None:
        if self._on_ready is not None:
            self._on_ready()
            self._on_ready = None

    def _broadcast(self, message: ToReplica, *, but: DpRank | None = None) -> None:
        for dp_rank in self._registry.ready_dp_ranks:
            if dp_rank != but:
                self._send(dp_rank, message)

    def _send(self, dp_rank: DpRank, message: ToReplica) -> None:
        error = self._send_frames(replica_identity(dp_rank), message)
        if error is not None and self._registry.incarnation(dp_rank) is not None:
            logger.warning("replica %d is gone: %s", dp_rank, error)
            self._registry.lose_all()

    def _send_frames(self, identity: bytes, message: ToReplica | ToMigrator) -> BaseException | None:
        """Returns what went wrong: nobody of that name is connected."""
        sent = self._socket.send_multipart([identity, self._encoder.encode(message)], flags=zmq.DONTWAIT)
        assert isinstance(sent, asyncio.Future)
        return sent.exception()  # with DONTWAIT it is done already
