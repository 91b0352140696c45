"""Serves a rank's expert records to the other ranks, in a thread beside the steps."""

import logging
import socket
import threading
import time
from collections.abc import Callable

from moeserve.experts.migration.holdings import Holdings, NotHeldError
from moeserve.experts.migration.record_format import (
    RecordHeader,
    RecordRequest,
    checksum,
    receive_frame,
    send_frame,
)

logger = logging.getLogger(__name__)

_MAX_CHUNK_BYTES = 256 * 1024
_CHUNK_S = 0.05
"""What a slow reader asks for is sent in pieces that take so long."""
_ACCEPT_TIMEOUT_S = 0.2
_PEER_TIMEOUT_S = 5.0
"""A reader that neither asks nor takes anything for so long is let go."""
_MAX_CATCH_UP_S = 5.0
"""Ranks commit at one step: one that is so far behind is about to end."""


class RecordServer:
    """One reader at a time, so that what the rank sends keeps to the rate that each reader asks for.

    `on_death` is called in the thread when it ends by an error of its own; errors of readers' connections are theirs.
    """

    def __init__(self, holdings: Holdings, *, host: str, on_death: Callable[[BaseException], None]) -> None:
        self._holdings = holdings
        self._on_death = on_death
        self._stopping = threading.Event()
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.settimeout(_ACCEPT_TIMEOUT_S)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """host:port."""
        self._thread = threading.Thread(target=self._run, name="expert-records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at the next chunk and give the port back."""
        self._stopping.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    self._serve(connection)
        except BaseException as error:  # noqa: BLE001 - no thread dies quietly
            self._on_death(error)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_PEER_TIMEOUT_S)
            give_up_at = time.monotonic() + _PEER_TIMEOUT_S
            request = receive_frame(connection, RecordRequest, lambda: _check_time(give_up_at))
            self._answer(connection, request)
        except OSError as error:
            logger.info("a reader of expert records went away: %s", error)

    def _answer(self, connection: socket.socket, request: RecordRequest) -> None:
        try:
            packed = self._holdings.read(
                request.layer,
                request.logical_id,
                epoch=request.epoch,
                timeout_s=min(request.timeout_s, _MAX_CATCH_UP_S),
            )
        except NotHeldError as error:
            send_frame(connection, RecordHeader(error=str(error)))
            return
        data = packed.numpy().data
        send_frame(connection, RecordHeader(num_bytes=len(data), checksum=checksum(data)))
        start = time.monotonic()
        chunk_bytes = max(1, min(_MAX_CHUNK_BYTES, int(request.bytes_per_s * _CHUNK_S)))
        for first in range(0, len(data), chunk_bytes):
            chunk = data[first : first + chunk_bytes]
            connection.sendall(chunk)
            due_s = start + (first + len(chunk)) / request.bytes_per_s - time.monotonic()
            if due_s > 0 and self._stopping.wait(due_s):
                return


def _check_time(give_up_at: float) -> None:
    if time.monotonic() > give_up_at:
        raise TimeoutError("it never asked for a record")
