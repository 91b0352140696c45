"""The thread of a rank that talks with the frontend about expert placement, over a ZeroMQ socket of its own.

Each ordered change is staged in a thread that ends with it, so that orders are heard and loads reported meanwhile.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import msgspec
import torch
import zmq

from moeserve.engine.placement_messages import (
    AbortStaging,
    ChangeFailed,
    ChangeStaged,
    FromMigrator,
    MigratorReady,
    StageChange,
    ToMigrator,
    migrator_identity,
)
from moeserve.experts.migration.errors import StagingError
from moeserve.experts.migration.holdings import Holdings
from moeserve.experts.migration.slot import ChangeSlot
from moeserve.experts.migration.staging import stage_change
from moeserve.worker.migration.orders import read_order

_LINGER_MS = 1000


class Migrator:
    """Says `ready` first. `on_death` is called in a thread of the migrator that ends by an error, once for each."""

    def __init__(
        self,
        *,
        frontend_address: str,
        ready: MigratorReady,
        holdings: Holdings,
        slot: ChangeSlot,
        device: torch.device,
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._frontend_address = frontend_address
        self._ready = ready
        self._holdings = holdings
        self._slot = slot
        self._device = device
        self._on_death = on_death
        self._outgoing: SimpleQueue[FromMigrator] = SimpleQueue()
        self._stopping = threading.Event()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._stagers: list[threading.Thread] = []
        self._thread = self._start(self._run, "migrator")

    def say(self, message: FromMigrator) -> None:
        """Send it to the frontend, from any thread, without waiting."""
        self._outgoing.put(message)
        self._wake()

    def close(self) -> None:
        """End all threads; what was said before leaves within a second."""
        self._stopping.set()
        self._wake()
        self._thread.join()
        self._slot.abort_all()
        for stager in self._stagers:
            stager.join()
        self._waker.close()
        self._wakened.close()

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - no thread dies quietly
                self._on_death(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # woken already
            self._waker.send(b"\0")

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.IDENTITY, migrator_identity(self._ready.rank))
            dealer.setsockopt(zmq.LINGER, _LINGER_MS)
            dealer.set_hwm(0)
            dealer.connect(self._frontend_address)
            poller = zmq.Poller()
            poller.register(dealer, zmq.POLLIN)
            poller.register(self._wakened, zmq.POLLIN)
            dealer.send(encode(self._ready))
            while not self._stopping.is_set():
                poller.poll()
                with suppress(BlockingIOError):
                    self._wakened.recv(4096)
                self._hear_all(dealer)
                with suppress(Empty):
                    while True:
                        dealer.send(encode(self._outgoing.get_nowait()))

    def _hear_all(self, dealer: zmq.Socket[bytes]) -> None:
        decoder = msgspec.msgpack.Decoder(ToMigrator)
        with suppress(zmq.Again):
            while True:
                message: ToMigrator = decoder.decode(dealer.recv(zmq.NOBLOCK))
                match message:
                    case StageChange():
                        self._order(message)
                    case AbortStaging():
                        self._slot.abort(message.change_id)

    def _order(self, message: StageChange) -> None:
        deadline = time.monotonic() + message.timeout_s
        aborted = self._slot.announce(message.change_id)
        self._stagers = [stager for stager in self._stagers if stager.is_alive()]
        name = f"change-{message.change_id}"
        self._stagers.append(self._start(lambda: self.say(self._stage(message, deadline, aborted)), name))

    def _stage(self, message: StageChange, deadline: float, aborted: threading.Event) -> ChangeStaged | ChangeFailed:
        """Stage the change and return the answer to its order."""
        rank = self._ready.rank
        start, cpu_start = time.monotonic(), time.thread_time()
        try:
            with self._slot.turn(message.change_id, deadline):
                order = read_order(message, self._holdings.places.placement, deadline=deadline, aborted=aborted)
                staged = stage_change(order, self._holdings, self._device)
                self._slot.put(staged)
        except StagingError as error:
            return ChangeFailed(rank=rank, change_id=message.change_id, reason=str(error))
        return ChangeStaged(
            rank=rank,
            change_id=message.change_id,
            num_bytes=staged.num_bytes,
            copy_s=time.monotonic() - start,
            lost_s=time.thread_time() - cpu_start,
        )
