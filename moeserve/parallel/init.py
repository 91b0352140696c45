"""How a rank joins the groups of its engine, and what carries each of them."""

import logging
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moeserve.parallel.group import Group, Transport
from moeserve.parallel.layout import ParallelLayout
from moeserve.parallel.process_group import ProcessGroupTransport, naming_lost_peers
from moeserve.parallel.shared_memory import SharedMemoryUnavailable, host_of_this_process, join_shared_memory

logger = logging.getLogger(__name__)


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


@naming_lost_peers()
def init_parallel(
    layout: ParallelLayout, device: torch.device, *, restart_count: int = 0, timeout_s: float = 1800.0
) -> ParallelContext:
    """Join the engine's groups: NCCL on GPUs; on CPUs shared memory within a host, else gloo.

    Shared memory needs the native kernels loaded in all ranks of a group. The rendezvous (MASTER_ADDR, ...) is
    torchrun's; the default process group is made here if it is not there yet.

    restart_count: how often torchrun has started these ranks again. timeout_s: how long a collective waits for ranks
    that are alive; one that has died is noticed within seconds. Raises PeerLostError.
    """
    if layout.world_size == 1:
        return single_rank_context(device)
    if not dist.is_initialized():
        _init_process_group(layout, device, restart_count, timedelta(seconds=timeout_s))
    hosts = _hosts_of_ranks(layout, device)

    def join(partition: list[list[int]]) -> Group:
        return _join(partition, layout.rank, hosts, timeout_s)

    context = ParallelContext(
        layout,
        device,
        tp=join(layout.tp_partition),
        dp=join(layout.dp_partition),
        ep=join([list(range(layout.world_size))]),
    )
    if layout.rank == 0:
        groups = {"tp": context.tp, "dp": context.dp, "ep": context.ep}
        carried = [f"{name} by {group.transport_name}" for name, group in groups.items() if group.size > 1]
        logger.info("collectives: %s", ", ".join(carried))
    return context


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


def _hosts_of_ranks(layout: ParallelLayout, device: torch.device) -> list[str | None]:
    """Of every rank the host on which it may share memory, None for one that may not."""
    hosts: list[str | None] = [None] * layout.world_size
    if device.type == "cpu":
        dist.all_gather_object(hosts, host_of_this_process())
    return hosts


def _join(partition: list[list[int]], rank: int, hosts: list[str | None], timeout_s: float) -> Group:
    """Make every group of the partition (all ranks must) and return the one `rank` is in."""
    mine = Group(None, size=1, rank=0)
    for ranks in partition:
        process_group = dist.new_group(ranks) if len(ranks) > 1 else None
        if process_group is not None and rank in ranks:
            is_one_host = len({hosts[member] for member in ranks}) == 1 and hosts[rank] is not None
            transport = _transport(process_group, is_one_host=is_one_host, timeout_s=timeout_s)
            mine = Group(transport, size=len(ranks), rank=ranks.index(rank))
    return mine


def _transport(process_group: dist.ProcessGroup, *, is_one_host: bool, timeout_s: float) -> Transport:
    if is_one_host:
        try:
            return join_shared_memory(process_group, timeout_s=timeout_s)
        except SharedMemoryUnavailable as error:
            logger.warning("ranks of one host talk over TCP, because they cannot share memory: %s", error)
    return ProcessGroupTransport(process_group)
