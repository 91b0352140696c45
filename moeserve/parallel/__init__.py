"""The parallel layout and the groups in which ranks exchange tensors: the one owner of both.

An engine is `tp_size x dp_size` ranks, rank = dp_rank * tp_size + tp_rank. Attention is split over the `tp` group of a
DP replica; experts are spread over the `ep` group, which is always the whole engine. `dp` is the group of ranks with
the same tp_rank, one of each replica. Layers receive their group and their shard; they never ask who they are.
"""

from moeserve.parallel.group import Group, Transport
from moeserve.parallel.init import ParallelContext, init_parallel, single_rank_context
from moeserve.parallel.layout import ParallelLayout, shard_range
from moeserve_kernels.shm_collectives import PeerLostError

__all__ = [
    "Group",
    "ParallelContext",
    "ParallelLayout",
    "PeerLostError",
    "Transport",
    "init_parallel",
    "shard_range",
    "single_rank_context",
]
