"""A source of expert records that does with them what networks and dying ranks do, in front of a real source."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from moeserve.experts.migration.record_format import (
    RecordHeader,
    RecordRequest,
    receive_exactly,
    receive_frame,
    send_frame,
)

Fault = Literal["flips a bit", "dies half way", "says nothing", "sends another size"]
_POLL_S = 0.05


@contextmanager
def faulty_source(address: str, fault: Fault) -> Iterator[str]:
    """The address of a source in front of the one at `address`."""
    stopping = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_POLL_S)

        def serve() -> None:
            while not stopping.is_set():
                try:
                    reader, _ = listener.accept()
                except TimeoutError:
                    continue
                with reader, suppress(OSError):
                    reader.setblocking(True)
                    _answer(reader, address, fault, stopping)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stopping.set()
            thread.join()


def _answer(reader: socket.socket, address: str, fault: Fault, stopping: threading.Event) -> None:
    request = receive_frame(reader, RecordRequest, _go_on)
    if fault == "says nothing":
        stopping.wait()
        return
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as source:
        send_frame(source, request)
        header = receive_frame(source, RecordHeader, _go_on)
        data = receive_exactly(source, header.num_bytes, _go_on)
    match fault:
        case "flips a bit":
            data[len(data) // 2] ^= 16
        case "dies half way":
            data = data[: len(data) // 2]
        case "sends another size":
            header = RecordHeader(num_bytes=header.num_bytes - 1, checksum=header.checksum)
    send_frame(reader, header)
    reader.sendall(data)


def _go_on() -> None:
    """The reader's patience is what counts."""
