"""Collectives between processes of one host over shared memory (native only)."""

from moeserve_kernels.shm_collectives.op import (
    MembersDisagreeError,
    PeerLostError,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    reduce_scatter,
)
from moeserve_kernels.shm_collectives.segment import Segment, create_segment, join_segment

__all__ = [
    "MembersDisagreeError",
    "PeerLostError",
    "Segment",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "create_segment",
    "join_segment",
    "reduce_scatter",
]
