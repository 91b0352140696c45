"""A frontend for tests of replicas: binds the socket, relays waves, and keeps what it hears."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import zmq

from moeserve.engine.messages import (
    ReplicaReady,
    StartWave,
    StepOutputs,
    ToFrontend,
    ToReplica,
    WaveStarted,
    replica_identity,
)
from moeserve.engine.outputs import FinishReason, ReplicaStats
from moeserve.engine.placement_messages import FromMigrator, migrator_rank
from moeserve.ids import DpRank, RequestId

_TIMEOUT_S = 20


class FakeFrontend:
    """What replicas see of a frontend. Fails when they say nothing for too long."""

    def __init__(self, router: zmq.Socket[bytes], address: str, dp_size: int) -> None:
        self.router = router
        self.address = address
        self.dp_size = dp_size
        self.heard: list[ToFrontend] = []
        self.heard_of_placement: list[FromMigrator] = []
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, FinishReason] = {}
        self.stats: dict[DpRank, ReplicaStats] = {}
        self._decoder: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
        self._migrator_decoder: msgspec.msgpack.Decoder[FromMigrator] = msgspec.msgpack.Decoder(FromMigrator)

    def send(self, dp_rank: int, message: ToReplica) -> None:
        self.send_frame(dp_rank, msgspec.msgpack.encode(message))

    def send_frame(self, dp_rank: int, frame: bytes) -> None:
        self.router.send_multipart([replica_identity(DpRank(dp_rank)), frame])

    def receive(self) -> ToFrontend | FromMigrator:
        """The next message, after doing what it asks for."""
        assert self.router.poll(_TIMEOUT_S * 1000), "no word from the ranks"
        identity, frame = self.router.recv_multipart()
        if migrator_rank(identity) is not None:
            from_migrator: FromMigrator = self._migrator_decoder.decode(frame)
            self.heard_of_placement.append(from_migrator)
            return from_migrator
        message = self._decoder.decode(frame)
        self.heard.append(message)
        match message:
            case WaveStarted():
                for dp_rank in set(range(self.dp_size)) - {message.dp_rank}:
                    self.send(dp_rank, StartWave(wave_id=message.wave_id))
            case StepOutputs():
                self.stats[message.dp_rank] = message.stats
                for news in message.outputs:
                    assert news.request_id not in self.ended, "the end is the last word"
                    self.outputs.setdefault(news.request_id, []).extend(news.new_token_ids)
                    if news.finish_reason is not None:
                        self.ended[news.request_id] = news.finish_reason
        return message

    def wait_for_ready(self) -> None:
        """Until every replica has said so; no request may be sent before."""
        num_ready = 0
        while num_ready < self.dp_size:
            message = self.receive()
            assert not isinstance(message, StepOutputs | WaveStarted), "a replica spoke before it was ready"
            num_ready += isinstance(message, ReplicaReady)

    def receive_until_step(self, step_id: int) -> None:
        """Until this step is the last thing every replica has told of."""
        self.receive_until(lambda: [s.step_id for s in self.stats.values()] == [step_id] * self.dp_size)

    def receive_until_ended(self, *request_ids: RequestId) -> None:
        self.receive_until(lambda: self.ended.keys() >= set(request_ids))

    def receive_until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_done():
            assert time.monotonic() < deadline, f"ended are {sorted(self.ended)}, replicas are at {self.stats}"
            self.receive()


@contextmanager
def listening_frontend(dp_size: int = 1) -> Iterator[FakeFrontend]:
    """A frontend for `dp_size` replicas on a free port of this host."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield FakeFrontend(router, f"tcp://127.0.0.1:{port}", dp_size)
