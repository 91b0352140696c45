"""The one owner of the parallel layout: who a rank is, and the process groups it talks in.

An engine is `tp_size x dp_size` ranks, rank = dp_rank * tp_size + tp_rank. Attention is split over the `tp` group of a
DP replica; experts are spread over the `ep` group, which is always the whole engine. `dp` is the group of ranks with
the same tp_rank, one of each replica. Layers receive their group and their shard; they never ask who they are.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moeserve.config import ConfigError, ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Where a rank stands in its engine."""

    tp_size: int = 1
    dp_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} does not exist: tensor_parallel_size {self.tp_size} x data_parallel_size "
                f"{self.dp_size} is {self.world_size} ranks"
            )

    @staticmethod
    def build(config: ParallelConfig, *, rank: int, world_size: int) -> "ParallelLayout":
        """Check the configured sizes against the ranks that were started."""
        if config.world_size != world_size:
            raise ConfigError(
                f"{world_size} ranks were started, but tensor_parallel_size {config.tensor_parallel_size} x "
                f"data_parallel_size {config.data_parallel_size} is {config.world_size}: "
                "change --nproc-per-node, -tp or -dp"
            )
        return ParallelLayout(tp_size=config.tensor_parallel_size, dp_size=config.data_parallel_size, rank=rank)

    @property
    def world_size(self) -> int:
        return self.tp_size * self.dp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def is_leader(self) -> bool:
        """Leaders (tp_rank 0) hold their replica's scheduler and sampler."""
        return self.tp_rank == 0


class Group:
    """Collectives over some of the engine's ranks; with one member every call is the identity.

    All members call in the same order. Tensors may be of any dtype the backend knows; results are new tensors unless
    said otherwise.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, size: int, rank: int) -> None:
        assert (process_group is None) == (size == 1)
        self.size = size
        self.rank = rank
        self._process_group = process_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the members, in place."""
        if self._process_group is not None and x.numel() > 0:
            dist.all_reduce(x, group=self._process_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] of each member, N equal everywhere, to [size, N, ...] in rank order."""
        if self._process_group is None:
            return x.unsqueeze(0)
        out = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(out, x.contiguous(), group=self._process_group)
        return torch.stack(out)

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Send `send_counts[i]` rows of [sum(send_counts), ...] to member i; returns [sum(receive_counts), ...]."""
        if self._process_group is None:
            return x
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), receive_counts, send_counts, group=self._process_group)
        return out

    def barrier(self) -> None:
        """Return when every member has come."""
        self.all_reduce(torch.zeros(1))


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Layout, groups and device of this rank, handed to whatever needs them."""

    layout: ParallelLayout
    device: torch.device
    tp: Group
    dp: Group
    ep: Group


def single_rank_context(device: torch.device | None = None) -> ParallelContext:
    """One rank alone: no process group is made."""
    alone = Group(None, size=1, rank=0)
    return ParallelContext(ParallelLayout(), device or torch.device("cpu"), tp=alone, dp=alone, ep=alone)


def init_parallel(
    layout: ParallelLayout, device: torch.device, *, restart_count: int = 0, timeout_s: float = 1800.0
) -> ParallelContext:
    """Join the engine's groups: NCCL on GPUs, gloo on CPUs.

    The rendezvous (MASTER_ADDR, ...) is torchrun's; the default process group is made here if it is not there yet.
    restart_count: how often torchrun has started these ranks again.
    """
    if layout.world_size == 1:
        return single_rank_context(device)
    if not dist.is_initialized():
        _init_process_group(layout, device, restart_count, timedelta(seconds=timeout_s))
    tp_ranks = [[d * layout.tp_size + t for t in range(layout.tp_size)] for d in range(layout.dp_size)]
    dp_ranks = [[d * layout.tp_size + t for d in range(layout.dp_size)] for t in range(layout.tp_size)]
    world = [list(range(layout.world_size))]
    return ParallelContext(
        layout,
        device,
        tp=_join(tp_ranks, layout.rank),
        dp=_join(dp_ranks, layout.rank),
        ep=_join(world, layout.rank),
    )


def _init_process_group(layout: ParallelLayout, device: torch.device, restart_count: int, timeout: timedelta) -> None:
    """torchrun's store may outlive its ranks: in a space of its own no life of them finds the addresses of another."""
    store, _, _ = next(rendezvous("env://", layout.rank, layout.world_size, timeout=timeout))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"life_{restart_count}", store),  # type: ignore[attr-defined]
        rank=layout.rank,
        world_size=layout.world_size,
        timeout=timeout,
    )


def _join(partition: list[list[int]], rank: int) -> Group:
    """Make every group of the partition (all ranks must) and return the one `rank` is in."""
    mine = Group(None, size=1, rank=0)
    for ranks in partition:
        process_group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Group(process_group, size=len(ranks), rank=ranks.index(rank))
    return mine


def shard_range(total: int, size: int, rank: int) -> slice:
    """The rank's share of `total` items, in order; sizes differ by at most one, the first ranks have more."""
    quotient, remainder = divmod(total, size)
    start = rank * quotient + min(rank, remainder)
    return slice(start, start + quotient + (rank < remainder))
