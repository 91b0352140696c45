"""Which expert lies where: the physical-to-logical map, the cluster shape and the epoch.

Axes: L MoE layers, E logical experts, P physical experts of the EP group. The physical experts of rank r are
`rank_slice(r)`; their number may differ by one between ranks, so any number of experts fits any number of ranks.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

FORMAT = "moeserve-placement-1"


class PlacementError(ValueError):
    """A placement that cannot be: names what is wrong, the value and what is accepted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertPlacement:
    """A committed placement of every MoE layer.

    Every logical expert has at least one physical expert in every layer, and no rank holds the same one twice.
    """

    physical_to_logical_LP: npt.NDArray[np.int64]
    num_logical_experts: int
    num_ranks: int
    epoch: int = 0

    def __post_init__(self) -> None:
        table = self.physical_to_logical_LP
        if table.ndim != 2 or self.num_ranks < 1 or self.num_logical_experts < 1:
            raise PlacementError(f"a placement is a layers x physical experts table, got shape {table.shape}")
        num_physical = table.shape[1]
        if num_physical < max(self.num_logical_experts, self.num_ranks):
            raise PlacementError(
                f"{num_physical} physical experts are too few for {self.num_logical_experts} logical experts on "
                f"{self.num_ranks} ranks: one for each is the least"
            )
        for layer, row in enumerate(table):
            self._check_layer(layer, row)
        table.setflags(write=False)

    def _check_layer(self, layer: int, row: npt.NDArray[np.int64]) -> None:
        if row.min(initial=0) < 0 or row.max(initial=0) >= self.num_logical_experts:
            raise PlacementError(f"layer {layer}: logical expert ids must be in [0, {self.num_logical_experts})")
        missing = np.setdiff1d(np.arange(self.num_logical_experts), row)
        if missing.size:
            raise PlacementError(f"layer {layer}: logical expert {missing[0]} has no physical expert")
        for rank in range(self.num_ranks):
            held = row[self.rank_slice(rank)]
            if np.unique(held).size != held.size:
                raise PlacementError(f"layer {layer}: rank {rank} holds two copies of one expert: {held.tolist()}")

    @staticmethod
    def identity(
        *, num_layers: int, num_logical_experts: int, num_ranks: int, num_redundant_experts: int = 0
    ) -> "ExpertPlacement":
        """Experts in order over the ranks; redundant ones repeat experts from 0 on, on ranks that lack them.

        Raises PlacementError where there are fewer physical experts than ranks, or more copies than ranks.
        """
        num_physical = num_logical_experts + num_redundant_experts
        if num_redundant_experts > num_logical_experts * (num_ranks - 1):
            raise PlacementError(
                f"num_redundant_experts must be at most {num_logical_experts * (num_ranks - 1)} for "
                f"{num_logical_experts} experts on {num_ranks} ranks, got {num_redundant_experts}"
            )
        # Experts in order, wrapping around: a rank's contiguous slice is shorter than a cycle unless it holds all.
        row = np.arange(num_physical, dtype=np.int64) % num_logical_experts
        table = np.tile(row, (num_layers, 1))
        return ExpertPlacement(
            physical_to_logical_LP=table, num_logical_experts=num_logical_experts, num_ranks=num_ranks
        )

    @property
    def num_layers(self) -> int:
        return int(self.physical_to_logical_LP.shape[0])

    @property
    def num_physical_experts(self) -> int:
        return int(self.physical_to_logical_LP.shape[1])

    @property
    def num_redundant_experts(self) -> int:
        return self.num_physical_experts - self.num_logical_experts

    def rank_slice(self, rank: int) -> slice:
        """Physical expert ids of a rank; the first ranks hold one more where the number does not divide."""
        quotient, remainder = divmod(self.num_physical_experts, self.num_ranks)
        start = rank * quotient + min(rank, remainder)
        return slice(start, start + quotient + (rank < remainder))

    @cached_property
    def rank_of_physical_P(self) -> npt.NDArray[np.int64]:
        """The rank of each physical expert."""
        ranks = np.empty(self.num_physical_experts, dtype=np.int64)
        for rank in range(self.num_ranks):
            ranks[self.rank_slice(rank)] = rank
        return ranks

    @cached_property
    def num_replicas_LE(self) -> npt.NDArray[np.int64]:
        """Physical experts of each logical expert."""
        return np.stack([np.bincount(row, minlength=self.num_logical_experts) for row in self.physical_to_logical_LP])

    @cached_property
    def logical_to_physical_LEC(self) -> npt.NDArray[np.int64]:
        """Physical expert id of each replica, in order of id; C is the most replicas, -1 fills up."""
        most = int(self.num_replicas_LE.max())
        table = np.full((self.num_layers, self.num_logical_experts, most), -1, dtype=np.int64)
        for layer, row in enumerate(self.physical_to_logical_LP):
            next_replica = np.zeros(self.num_logical_experts, dtype=np.int64)
            for physical, logical in enumerate(row):
                table[layer, logical, next_replica[logical]] = physical
                next_replica[logical] += 1
        return table

    def save(self, path: Path) -> None:
        """Write the JSON file that `load` reads."""
        record = {
            "format": FORMAT,
            "epoch": self.epoch,
            "num_logical_experts": self.num_logical_experts,
            "num_ranks": self.num_ranks,
            "physical_to_logical": self.physical_to_logical_LP.tolist(),
        }
        path.write_text(json.dumps(record))

    @staticmethod
    def load(path: Path) -> "ExpertPlacement":
        """Read a placement file. Raises PlacementError naming the file and what is wrong with it."""
        try:
            record = json.loads(path.read_text())
            if record.get("format") != FORMAT:
                raise PlacementError(f"format must be {FORMAT!r}, got {record.get('format')!r}")
            return ExpertPlacement(
                physical_to_logical_LP=np.asarray(record["physical_to_logical"], dtype=np.int64),
                num_logical_experts=int(record["num_logical_experts"]),
                num_ranks=int(record["num_ranks"]),
                epoch=int(record["epoch"]),
            )
        except OSError as error:
            raise PlacementError(f"placement file {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlacementError(f"placement file {path}: {error}") from error
