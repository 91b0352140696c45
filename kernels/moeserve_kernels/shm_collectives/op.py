"""Collectives of the members of a shared memory segment, in place or into tensors of the caller.

All members call in the same order, with contiguous CPU tensors. They wait without the interpreter lock: for a moment
busily, then asleep. Every function raises

- PeerLostError within a second when a member's process has ended before it came,
- TimeoutError when the segment's time-out has passed with all of them alive,
- MembersDisagreeError when members call for different things.

After an error the segment is of no use any more.
"""

from collections.abc import Sequence

import torch

from moeserve_kernels.shm_collectives.segment import Segment

_TIMED_OUT = -1
_MISMATCH = -2


class PeerLostError(RuntimeError):
    """A process that takes part in a collective has ended."""


class MembersDisagreeError(RuntimeError):
    """Members of a group called different collectives, or with different lengths."""


def barrier(segment: Segment) -> None:
    """Return when every member has come."""
    _check(torch.ops.moeserve.shm_barrier(segment.memory, segment.rank))


def all_reduce(segment: Segment, x: torch.Tensor) -> None:
    """x = the sum over members, the same bits everywhere; float32, bfloat16, float16 (added in float32) or int64."""
    _check(torch.ops.moeserve.shm_all_reduce(segment.memory, segment.rank, x))


def all_gather(segment: Segment, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Each of outs, [size, ...], = its x [...] of every member, in rank order; any dtypes. All go together."""
    for x, out in zip(xs, outs, strict=True):
        assert out.shape == (segment.size, *x.shape)
        assert out.dtype == x.dtype
    _check(torch.ops.moeserve.shm_all_gather(segment.memory, segment.rank, xs, outs))


def all_to_all(
    segment: Segment, x: torch.Tensor, send_counts: list[int], out: torch.Tensor, receive_counts: list[int]
) -> None:
    """Rows of x [sum(send_counts), ...] to each member, rows of out [sum(receive_counts), ...] from each; any dtype."""
    assert len(send_counts) == len(receive_counts) == segment.size
    assert out.shape[1:] == x.shape[1:]
    assert out.dtype == x.dtype
    _check(torch.ops.moeserve.shm_all_to_all(segment.memory, segment.rank, x, send_counts, out, receive_counts))


def reduce_scatter(segment: Segment, x: torch.Tensor, out: torch.Tensor) -> None:
    """out [...] = the sum over members of x[rank] [size, ...]; dtypes as `all_reduce`."""
    assert x.shape == (segment.size, *out.shape)
    assert out.dtype == x.dtype
    _check(torch.ops.moeserve.shm_reduce_scatter(segment.memory, segment.rank, x, out))


def _check(status: int) -> None:
    if status == 0:
        return
    if status > 0:
        raise PeerLostError(f"the process of member {status - 1} of this group has ended")
    if status == _TIMED_OUT:
        raise TimeoutError("some member of this group did not come to a collective in time")
    assert status == _MISMATCH
    raise MembersDisagreeError("the members of this group called different collectives, or with different lengths")
