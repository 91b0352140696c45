"""How a replica's leader (tp_rank 0) tells its followers what to run: ZeroMQ, msgpack, one socket for each follower.

The leader binds; addresses are exchanged over the TP group when the channel is opened. Messages to one follower arrive
in order and none is lost while both live. A follower that waits looks now and then whether its parent still lives.
"""

import os
from contextlib import suppress

import msgspec
import zmq

from moeserve.engine.outputs import SchedulerOutput
from moeserve.parallel import ParallelContext
from moeserve.worker.hosts import Host, address_towards, exchange, this_host

_PARENT_CHECK_MS = 1000
_LINGER_MS = 1000
_SEND_TIMEOUT_MS = 60_000


class RunStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    output: SchedulerOutput
    votes_stop: bool = False
    commit_vote: int = 0
    """The change of the placement that this replica would commit with the step; 0: none."""
    dropped_change: int = 0
    """This change and all before it have been withdrawn: this replica never votes for them again."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The follower's loop ends."""


ToFollower = RunStep | Stop


class ParentDiedError(RuntimeError):
    """The process that started this rank is gone, so nobody will ever send a step again."""


class LeaderChannel:
    """The sending end. `send` copies the message into ZeroMQ's queues and does not wait for the followers."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._encoder = msgspec.msgpack.Encoder()

    def add_follower(self, interface: str) -> str:
        """Make room for one more follower; returns the address, at `interface`, that it must connect to."""
        follower = self._context.socket(zmq.PUSH)
        follower.setsockopt(zmq.SNDHWM, 0)
        follower.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)  # only one that never came makes the leader wait
        port = follower.bind_to_random_port(f"tcp://{interface}")
        self._sockets.append(follower)
        return f"tcp://{interface}:{port}"

    def send(self, message: ToFollower) -> None:
        frame = self._encoder.encode(message)
        for follower in self._sockets:
            follower.send(frame)

    def close(self) -> None:
        """End the loops of the followers that still listen; what was sent before is delivered, within a second."""
        frame = self._encoder.encode(Stop())
        for follower in self._sockets:
            with suppress(zmq.Again):  # a follower that has left already
                follower.send(frame, zmq.NOBLOCK)
            follower.close(linger=_LINGER_MS)
        self._context.term()


class FollowerChannel:
    """The receiving end."""

    def __init__(self, address: str) -> None:
        self._parent_pid = os.getppid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(ToFollower)

    def receive(self) -> ToFollower:
        """Sleep until the leader's next message. Raises ParentDiedError when this process has become an orphan."""
        while not self._socket.poll(_PARENT_CHECK_MS):
            if os.getppid() != self._parent_pid:
                raise ParentDiedError(f"the parent process {self._parent_pid} died")
        message: ToFollower = self._decoder.decode(self._socket.recv())
        return message

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def open_channel(parallel: ParallelContext) -> LeaderChannel | FollowerChannel:
    """Connect the ranks of a replica; collective over the TP group."""
    hosts = [msgspec.json.decode(r, type=Host) for r in exchange(this_host(), parallel.tp, parallel.device)]
    if not parallel.layout.is_leader:
        record = exchange({}, parallel.tp, parallel.device)[0]
        return FollowerChannel(msgspec.json.decode(record, type=dict[int, str])[parallel.tp.rank])
    channel = LeaderChannel()
    interfaces = {rank: address_towards(hosts[rank], this=hosts[0]) for rank in range(1, parallel.tp.size)}
    addresses = {rank: channel.add_follower(interface) for rank, interface in interfaces.items()}
    exchange(addresses, parallel.tp, parallel.device)
    return channel
