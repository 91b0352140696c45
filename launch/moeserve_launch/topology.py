"""What torchrun tells a rank about its place, and the limits a host sets: the one file that reads the environment."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from moeserve.config import ParallelConfig

FRONTEND_IS_RUNNING = "MOESERVE_FRONTEND_IS_RUNNING"
"""Set by the supervisor: the frontend is there already, and is not a rank's to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Place of this process among the ranks that torchrun started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    restart_count: int
    frontend_is_running: bool

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> "RankEnvironment | None":
        """None when torchrun did not start this process."""
        if "TORCHELASTIC_RUN_ID" not in environ:
            return None
        return RankEnvironment(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            master_addr=environ["MASTER_ADDR"],
            restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            frontend_is_running=FRONTEND_IS_RUNNING in environ,
        )

    @property
    def is_single_host(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def replica_host(self) -> str:
        """Where the replicas reach the frontend: it runs on the host of rank 0."""
        return "127.0.0.1" if self.is_single_host else self.master_addr

    @property
    def replica_bind_host(self) -> str:
        """Replicas on other hosts come in by whichever interface leads to them."""
        return "127.0.0.1" if self.is_single_host else "0.0.0.0"


def threads_per_rank(config: ParallelConfig, *, local_world_size: int) -> int:
    """CPU threads of each rank: cores / local ranks, so that there are never more busy threads than cores."""
    cores = len(os.sched_getaffinity(0))
    return config.threads_per_rank or max(1, cores // local_world_size)


def set_thread_environment(environ: MutableMapping[str, str], *, threads: int) -> None:
    """Before torch is imported in a rank: OpenMP reads this once."""
    environ["OMP_NUM_THREADS"] = str(threads)


def set_single_host_network(environ: MutableMapping[str, str]) -> None:
    """gloo between ranks of one host goes over loopback, whatever the host's name resolves to."""
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
