"""The shared memory of one host as a transport, and how the members of a group come together in it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeserve_kernels import native, shm_collectives
from moeserve_kernels.shm_collectives import Segment


class SharedMemoryUnavailable(RuntimeError):  # noqa: N818 - a state of the host: torch.distributed serves in its place
    """The members of a group cannot map the same memory; the message says why."""


class SharedMemoryTransport:
    """Collectives over a segment that all members have mapped."""

    name = "shared memory"

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def barrier(self) -> None:
        shm_collectives.barrier(self._segment)

    def all_reduce(self, x: torch.Tensor) -> None:
        shm_collectives.all_reduce(self._segment, x)

    def all_gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        shm_collectives.all_gather(self._segment, xs, outs)

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], out: torch.Tensor, receive_counts: list[int]) -> None:
        shm_collectives.all_to_all(self._segment, x, send_counts, out, receive_counts)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        shm_collectives.reduce_scatter(self._segment, x, out)


def host_of_this_process() -> str | None:
    """Equal for processes that can share memory and watch each other; None where that cannot be done at all."""
    if not native.is_loaded():
        return None
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def join_shared_memory(process_group: dist.ProcessGroup, *, timeout_s: float) -> SharedMemoryTransport:
    """Map one segment on all members of the group, which must be on one host; collective over it.

    timeout_s: how long a collective waits for members that are alive. Raises SharedMemoryUnavailable, on all members
    alike.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    fd, segment, problem = None, None, None
    try:
        fd = shm_collectives.create_segment(size, timeout_s=timeout_s) if rank == 0 else None
    except OSError as error:
        problem = str(error)
    path = _exchange(f"/proc/{os.getpid()}/fd/{fd}", process_group)[0]
    try:
        segment = shm_collectives.join_segment(path, rank=rank, size=size)
    except OSError as error:
        problem = problem or str(error)
    problems = [p for p in _exchange(problem, process_group) if p is not None]
    if fd is not None:
        os.close(fd)
    if segment is None or problems:
        raise SharedMemoryUnavailable(problems[0])
    return SharedMemoryTransport(segment)


def _exchange(value: Any, process_group: dist.ProcessGroup) -> list[Any]:
    """The value of every member."""
    values = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values
