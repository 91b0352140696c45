"""The memory that the members of a group share: made by one of them, mapped by all, without a name to clean up.

It is an anonymous file (`memfd_create`), which the others open through the maker's `/proc/<pid>/fd`. So nothing is left
behind however the processes end, and a small `/dev/shm`, as in containers, does not limit it.
"""

import mmap
import os
from dataclasses import dataclass

import torch

_SLOT_BYTES = 256 * 1024
"""What a member shows the others at once: it stays in the second-level cache."""
_SPIN_S = 50e-6
"""Longer than ranks in step usually wait for each other; less than a step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """One member's view of a segment; the memory is unmapped with the last reference to it."""

    memory: torch.Tensor
    rank: int
    size: int


def create_segment(size: int, *, timeout_s: float) -> int:
    """A segment for `size` members, as a file descriptor that may be closed once all have joined.

    timeout_s: how long a collective waits for members that are alive.
    """
    ops = torch.ops.moeserve
    fd = os.memfd_create("moeserve-collectives", os.MFD_CLOEXEC)
    os.ftruncate(fd, ops.shm_segment_bytes(size, _SLOT_BYTES))
    ops.shm_create(_map(fd), size, _SLOT_BYTES, timeout_s, _SPIN_S)
    return fd


def join_segment(path: str, *, rank: int, size: int) -> Segment:
    """Map the segment at `path`, `/proc/<pid>/fd/<fd>` of the process that made it.

    Every member must have joined before the first collective. Raises OSError where the file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = _map(fd)
    finally:
        os.close(fd)
    torch.ops.moeserve.shm_join(memory, rank)
    return Segment(memory=memory, rank=rank, size=size)


def _map(fd: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
