"""The shape experts are placed on: ranks, their nodes, how many physical experts each holds and how fast it is.

Axes: R ranks of the EP group, P physical experts, s places of a rank (padded to the most any rank has).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.placement import ExpertPlacement, PlacementError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where experts may lie. A place is room for one physical expert; places are numbered rank by rank.

    Raises PlacementError where the three tuples do not describe the same ranks.
    """

    num_physical_by_rank: tuple[int, ...]
    node_of_rank: tuple[int, ...]
    capacity_by_rank: tuple[float, ...]
    """Relative speed: a rank of capacity 2 takes as long over two tokens as a rank of capacity 1 over one."""

    def __post_init__(self) -> None:
        num_ranks = len(self.num_physical_by_rank)
        if not num_ranks or len(self.node_of_rank) != num_ranks or len(self.capacity_by_rank) != num_ranks:
            raise PlacementError(
                f"a cluster needs one node and one capacity for each rank, got {num_ranks} ranks, "
                f"{len(self.node_of_rank)} nodes and {len(self.capacity_by_rank)} capacities"
            )
        if min(self.num_physical_by_rank) < 1 or min(self.capacity_by_rank) <= 0 or min(self.node_of_rank) < 0:
            raise PlacementError(
                "every rank needs at least 1 physical expert, a node of at least 0 and a capacity above 0"
            )

    @staticmethod
    def uniform(*, num_ranks: int, num_physical_experts: int, num_nodes: int = 1) -> "Cluster":
        """Equal ranks in equal consecutive nodes; the first ranks hold one more where the number does not divide."""
        if num_ranks < 1 or not 1 <= num_nodes <= num_ranks:
            raise PlacementError(f"num_nodes must be in [1, {num_ranks}], the number of ranks, got {num_nodes}")
        quotient, remainder = divmod(num_physical_experts, num_ranks)
        return Cluster(
            num_physical_by_rank=tuple(quotient + (rank < remainder) for rank in range(num_ranks)),
            node_of_rank=tuple(rank * num_nodes // num_ranks for rank in range(num_ranks)),
            capacity_by_rank=(1.0,) * num_ranks,
        )

    @staticmethod
    def of(placement: ExpertPlacement, *, num_nodes: int = 1) -> "Cluster":
        """The shape of a placement, its ranks equally fast and in equal consecutive nodes."""
        uniform = Cluster.uniform(
            num_ranks=placement.num_ranks, num_physical_experts=placement.num_physical_experts, num_nodes=num_nodes
        )
        return Cluster(
            num_physical_by_rank=tuple(int(size) for size in placement.num_physical_R),
            node_of_rank=uniform.node_of_rank,
            capacity_by_rank=uniform.capacity_by_rank,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.num_physical_by_rank)

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @cached_property
    def num_physical_experts(self) -> int:
        return sum(self.num_physical_by_rank)

    @cached_property
    def capacity_R(self) -> FloatArray:
        return np.asarray(self.capacity_by_rank, dtype=np.float64)

    @cached_property
    def node_R(self) -> IntArray:
        return np.asarray(self.node_of_rank, dtype=np.int64)

    @cached_property
    def rank_of_place_P(self) -> IntArray:
        return np.repeat(np.arange(self.num_ranks), self.num_physical_by_rank)

    @cached_property
    def place_Rs(self) -> IntArray:
        """The places of each rank; P, one past the last place, fills the rows of ranks with fewer."""
        sizes_R = np.asarray(self.num_physical_by_rank, dtype=np.int64)
        offset_s = np.arange(sizes_R.max(initial=0))
        starts_R = np.cumsum(sizes_R) - sizes_R
        return np.where(offset_s < sizes_R[:, None], starts_R[:, None] + offset_s, self.num_physical_experts)

    def places(self, rank: int) -> IntArray:
        """The places of one rank."""
        places: IntArray = self.place_Rs[rank, : self.num_physical_by_rank[rank]]
        return places
