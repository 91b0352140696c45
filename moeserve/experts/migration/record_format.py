"""How an expert record travels over TCP: frames, and the tensors of the record one behind the other as bytes.

    reader -> source   frame(RecordRequest)
    source -> reader   frame(RecordHeader), then header.num_bytes bytes; then the connection is closed

A frame is four bytes of length, little-endian, and msgpack. The checksum is CRC-32 (zlib) over the bytes: it finds what
memory, cables and software do to a record, not an attacker.
"""

import socket
import struct
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch

from moeserve_kernels import ExpertRecord, ExpertShape

MAX_FRAME_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
T = TypeVar("T")


class RecordRequest(msgspec.Struct, frozen=True, kw_only=True):
    layer: int
    """Index among the MoE layers."""
    logical_id: int
    epoch: int
    """Of the placement under which the source holds the expert."""
    bytes_per_s: float
    """No faster than this."""
    timeout_s: float
    """How long the reader would wait for the source to reach the epoch."""


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int = 0
    checksum: int = 0
    error: str = ""
    """Why there is no record."""


def pack_record(record: ExpertRecord) -> torch.Tensor:
    """The bytes of all tensors, uint8 on the host."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in record.values()]).cpu()


def unpack_record(data: bytearray, shape: ExpertShape) -> ExpertRecord:
    """The inverse of `pack_record`, for experts of this shape."""
    assert len(data) == shape.record_bytes
    flat = torch.frombuffer(data, dtype=torch.uint8)
    record: ExpertRecord = {}
    start = 0
    for name, (size, dtype) in shape.record.items():
        end = start + torch.Size(size).numel() * dtype.itemsize
        # A copy, because a tensor of wider elements must not start anywhere.
        record[name] = flat[start:end].clone().view(dtype).view(size)
        start = end
    return record


def checksum(data: bytearray | memoryview) -> int:
    return zlib.crc32(data)


def send_frame(connection: socket.socket, value: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(value)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(connection: socket.socket, frame_type: type[T], wait: Callable[[], None]) -> T:
    """The next frame. Raises ConnectionError where there is none or it is something else."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, wait))
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes is not one of ours")
    try:
        return msgspec.msgpack.decode(receive_exactly(connection, length, wait), type=frame_type)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"a frame is not one of ours: {error}") from error


def receive_exactly(connection: socket.socket, num_bytes: int, wait: Callable[[], None]) -> bytearray:
    """So many bytes; `wait` is called between receives and whenever the connection's timeout passes, and may raise."""
    data = bytearray(num_bytes)
    view, received = memoryview(data), 0
    while received < num_bytes:
        wait()
        try:
            count = connection.recv_into(view[received:])
        except TimeoutError:
            continue
        if count == 0:
            raise ConnectionError(f"the connection was closed {num_bytes - received} bytes too early")
        received += count
    return data
