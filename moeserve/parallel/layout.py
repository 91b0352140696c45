"""Who a rank is in its engine, and which share of something is its own."""

from dataclasses import dataclass

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

    @property
    def tp_partition(self) -> list[list[int]]:
        """Ranks of every DP replica."""
        return [[d * self.tp_size + t for t in range(self.tp_size)] for d in range(self.dp_size)]

    @property
    def dp_partition(self) -> list[list[int]]:
        """Ranks with the same tp_rank."""
        return [[d * self.tp_size + t for d in range(self.dp_size)] for t in range(self.tp_size)]


def shard_range(total: int, size: int, rank: int) -> slice:
    """The rank's share of `total` items, in order; sizes differ by at most one, the first ranks have more."""
    quotient, remainder = divmod(total, size)
    start = rank * quotient + min(rank, remainder)
    return slice(start, start + quotient + (rank < remainder))
