"""The loop of one DP replica: messages of the frontend in, steps, news out, over one ZeroMQ DEALER socket.

    start --ReplicaReady--> idle: sleeps in poll, no CPU <----------------------------+
                             |  request, CommitChange or DropChange (says             |
                             |  WaveStarted), or StartWave                            |
                             v                                                        | nobody has tokens
                            active: drain messages, step, send StepOutputs -----------+

`moeserve.engine.wave` says when to leave idle and draws the table of races. Nothing is caught here: an error in a
message, the scheduler or the model ends `run()` with that error, and with it the process.
"""

import socket
from contextlib import suppress
from dataclasses import replace
from threading import Event

import msgspec
import zmq

from moeserve.engine.core import EngineCore
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
from moeserve.engine.outputs import ReplicaStats, RequestOutput
from moeserve.engine.placement_messages import CommitChange, DropChange
from moeserve.engine.wave import WaveTracker
from moeserve.ids import DpRank

_LINGER_MS = 1000
"""How long the last news may take to leave when the loop ends."""


class ReplicaLoop:
    """Drives an `EngineCore` by what the frontend at `frontend_address` sends."""

    def __init__(
        self,
        core: EngineCore,
        *,
        frontend_address: str,
        dp_rank: DpRank,
        dp_size: int,
        incarnation: str,
        ready: ReplicaReady,
    ) -> None:
        assert 0 <= dp_rank < dp_size
        assert (ready.dp_rank, ready.incarnation) == (dp_rank, incarnation)
        self._core = core
        self._frontend_address = frontend_address
        self._dp_rank = dp_rank
        self._has_peers = dp_size > 1
        self._ready = ready
        self._wave = WaveTracker()
        self._last_stats: ReplicaStats | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
        self._stop_requested = Event()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)

    def run(self) -> None:
        """Serve until `stop()`; raises whatever goes wrong. Once only."""
        with self._waker, self._wakened, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.IDENTITY, replica_identity(self._dp_rank))
            dealer.setsockopt(zmq.LINGER, _LINGER_MS)
            # No limit on queued messages: a slow frontend must not stop the steps of the whole engine.
            dealer.set_hwm(0)
            dealer.connect(self._frontend_address)
            poller = zmq.Poller()
            poller.register(dealer, zmq.POLLIN)
            poller.register(self._wakened, zmq.POLLIN)
            self._send(dealer, self._ready)
            while not self._stop_requested.is_set():
                if self._wave.is_idle:
                    poller.poll()
                self._receive_all(dealer)
                if not self._wave.is_idle:
                    self._step(dealer)

    def stop(self) -> None:
        """Let `run()` return after the step it is in. Safe from any thread and from a signal handler."""
        self._stop_requested.set()
        with suppress(OSError):  # woken already, or closed: `run()` has returned
            self._waker.send(b"\0")

    def _receive_all(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(dealer, self._decoder.decode(frame))

    def _handle(self, dealer: zmq.Socket[bytes], message: ToReplica) -> None:
        match message:
            case AddRequest():
                self._core.add(message)
                self._wake(dealer)
            case AbortRequests():
                self._core.abort(message.request_ids)
            case StartWave():
                self._wave.start(message.wave_id)
            case CommitChange():
                self._core.commit_change(message.change_id)
                self._wake(dealer)
            case DropChange():
                self._core.drop_change(message.change_id)
                self._wake(dealer)

    def _wake(self, dealer: zmq.Socket[bytes]) -> None:
        """There is something to step for; peers that sleep must hear of it."""
        if self._wave.work_arrived() and self._has_peers:
            self._send(dealer, WaveStarted(dp_rank=self._dp_rank, wave_id=self._wave.wave_id))

    def _step(self, dealer: zmq.Socket[bytes]) -> None:
        news = self._core.step()
        if self._core.engine_is_idle:
            assert not self._core.has_unfinished, "requests are left, and none of them was scheduled"
            self._wave.end()
        self._report(dealer, news)

    def _report(self, dealer: zmq.Socket[bytes], news: list[RequestOutput]) -> None:
        """At most one message a step: with news, when the state has changed, and when a wave has ended."""
        stats = self._core.stats()
        is_unchanged = self._last_stats is not None and replace(self._last_stats, step_id=stats.step_id) == stats
        if news or not is_unchanged or self._core.engine_is_idle:
            self._last_stats = stats
            self._send(dealer, StepOutputs(dp_rank=self._dp_rank, outputs=news, stats=stats))

    def _send(self, dealer: zmq.Socket[bytes], message: ToFrontend) -> None:
        dealer.send(self._encoder.encode(message))
