"""The ranks of an engine as placement knows them: who has come in which life, and what all of them hold."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeserve.engine.placement_messages import MigratorReady, PlacementShape, unpack_array
from moeserve_placement import Cluster, ExpertPlacement, PlacementError
from moeserve_placement.arrays import FloatArray
from moeserve_placement.split import even_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Life:
    """One life of the ranks, from their start to the loss of any of them."""

    shape: PlacementShape
    placement: ExpertPlacement
    """In force when they started."""
    record_addresses: tuple[str, ...]
    """Where each rank serves its expert records."""

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(
            num_physical_by_rank=tuple(self.shape.num_physical_by_rank),
            node_of_rank=tuple(self.shape.node_of_rank),
            capacity_by_rank=(1.0,) * self.num_ranks,
        )

    @cached_property
    def even_split_LP(self) -> FloatArray:
        """What the ranks start with."""
        ones_LE = np.ones((self.placement.num_layers, self.placement.num_logical_experts))
        return even_tokens(self.placement.physical_to_logical_LP, ones_LE)

    @property
    def num_ranks(self) -> int:
        return len(self.record_addresses)

    @property
    def layer_ids(self) -> list[int]:
        """Layer of the model for each row of a table."""
        return list(self.shape.moe_layer_ids)


class RankRoll:
    """Calls the roll of each life: ranks live and die together."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ready: dict[int, MigratorReady] = {}

    def knows(self, rank: int) -> bool:
        return 0 <= rank < self._num_ranks

    @property
    def num_missing(self) -> int:
        return self._num_ranks - len(self._ready)

    def register(self, ready: MigratorReady) -> bool:
        """A rank came to life. True where its former life was thought to go on: its peers are new as well, then."""
        former = self._ready.get(ready.rank)
        is_new_life = former is not None and former.incarnation != ready.incarnation
        if is_new_life:
            self._ready.clear()
        self._ready[ready.rank] = ready
        return is_new_life

    def life(self) -> Life:
        """What the ranks hold, once all have come. Raises PlacementError where they do not agree on it."""
        assert not self.num_missing
        first = self._ready[0]
        for rank, ready in sorted(self._ready.items()):
            if (ready.shape, ready.placement, ready.epoch) != (first.shape, first.placement, first.epoch):
                raise PlacementError(f"ranks 0 and {rank} started with different expert placements")
        shape = first.shape
        if len(shape.num_physical_by_rank) != self._num_ranks:
            raise PlacementError(
                f"the ranks share experts among {len(shape.num_physical_by_rank)} ranks, the server has "
                f"{self._num_ranks}"
            )
        table = unpack_array(first.placement, "<i4", sum(shape.num_physical_by_rank))
        return Life(
            shape=shape,
            placement=ExpertPlacement(
                physical_to_logical_LP=table.astype(np.int64),
                num_logical_experts=shape.num_logical_experts,
                num_ranks=self._num_ranks,
                epoch=first.epoch,
                num_physical_by_rank=tuple(shape.num_physical_by_rank),
            ),
            record_addresses=tuple(self._ready[rank].record_address for rank in range(self._num_ranks)),
        )
