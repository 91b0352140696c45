"""Which expert lies where: the physical-to-logical map, the cluster shape and the epoch.

Axes: L MoE layers, E logical experts, P physical experts of the EP group, R ranks. The physical experts of rank r are
`rank_slice(r)`. Unless the placement says otherwise their number differs by at most one between ranks, so any number
of experts fits any number of ranks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
    """-1 is an empty place: a layer that was given fewer redundant experts than another."""
    num_logical_experts: int
    num_ranks: int
    epoch: int = 0
    num_physical_by_rank: tuple[int, ...] | None = None
    """Places of each rank; None shares them evenly, the first ranks holding one more where P does not divide."""

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
        sizes = self.num_physical_by_rank
        if sizes is not None and (len(sizes) != self.num_ranks or sum(sizes) != num_physical or min(sizes) < 1):
            raise PlacementError(
                f"num_physical_by_rank must be {self.num_ranks} numbers of at least 1 that sum to {num_physical}, "
                f"got {list(sizes)}"
            )
        self._check_experts()
        table.setflags(write=False)

    def _check_experts(self) -> None:
        table, num_logical = self.physical_to_logical_LP, self.num_logical_experts
        outside_L = ((table < -1) | (table >= num_logical)).any(axis=1)
        if outside_L.any():
            raise PlacementError(f"layer {outside_L.argmax()}: logical expert ids must be in [0, {num_logical})")
        if (self.num_replicas_LE == 0).any():
            layer, missing = np.argwhere(self.num_replicas_LE == 0)[0]
            raise PlacementError(f"layer {layer}: logical expert {missing} has no physical expert")
        # Sorted by rank, then expert, a second copy on a rank stands beside the first; equal ranks sort one by one.
        equal = (self.num_physical_R == self.num_physical_R[0]).all()
        width = int(self.num_physical_R[0]) if equal else self.num_physical_experts
        key = np.sort((table + self.rank_of_physical_P * (num_logical + 1)).reshape(-1, width), axis=1)
        twice = (key[:, 1:] == key[:, :-1]) & (key[:, 1:] % (num_logical + 1) != num_logical)
        if twice.any():
            row, index = np.argwhere(twice)[0]
            layer = row * width // self.num_physical_experts
            rank = int(key[row, index] // (num_logical + 1))
            held = table[layer, self.rank_slice(rank)].tolist()
            raise PlacementError(f"layer {layer}: rank {rank} holds two copies of one expert: {held}")

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

    @cached_property
    def num_physical_R(self) -> npt.NDArray[np.int64]:
        """Places of each rank."""
        if self.num_physical_by_rank is not None:
            return np.asarray(self.num_physical_by_rank, dtype=np.int64)
        quotient, remainder = divmod(self.num_physical_experts, self.num_ranks)
        return quotient + (np.arange(self.num_ranks) < remainder)

    @cached_property
    def _first_physical_R(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.num_physical_R) - self.num_physical_R

    def rank_slice(self, rank: int) -> slice:
        """Physical expert ids of a rank."""
        start = int(self._first_physical_R[rank])
        return slice(start, start + int(self.num_physical_R[rank]))

    @cached_property
    def rank_of_physical_P(self) -> npt.NDArray[np.int64]:
        """The rank of each physical expert."""
        return np.repeat(np.arange(self.num_ranks), self.num_physical_R)

    @cached_property
    def num_replicas_LE(self) -> npt.NDArray[np.int64]:
        """Physical experts of each logical expert."""
        # Column 0 counts the empty places.
        width = self.num_logical_experts + 1
        flat = self.physical_to_logical_LP + 1 + np.arange(self.num_layers)[:, None] * width
        return np.bincount(flat.ravel(), minlength=self.num_layers * width).reshape(-1, width)[:, 1:]

    @cached_property
    def logical_to_physical_LEC(self) -> npt.NDArray[np.int64]:
        """Physical expert id of each replica, in order of id; C is the most replicas, -1 fills up."""
        most = int(self.num_replicas_LE.max())
        table = np.full((self.num_layers, self.num_logical_experts, most), -1, dtype=np.int64)
        order_LP = np.argsort(self.physical_to_logical_LP, axis=1, kind="stable")
        logical_LP = np.take_along_axis(self.physical_to_logical_LP, order_LP, axis=1)
        layer, index = np.nonzero(logical_LP >= 0)
        logical = logical_LP[layer, index]
        num_empty_L = self.num_physical_experts - self.num_replicas_LE.sum(axis=1)
        first_LE = num_empty_L[:, None] + np.cumsum(self.num_replicas_LE, axis=1) - self.num_replicas_LE
        table[layer, logical, index - first_LE[layer, logical]] = order_LP[layer, index]
        return table

    def to_dict(self) -> dict[str, Any]:
        """JSON types: what a placement file holds and an operator is shown."""
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "num_logical_experts": self.num_logical_experts,
            "num_ranks": self.num_ranks,
            "num_physical_by_rank": self.num_physical_R.tolist(),
            "physical_to_logical": self.physical_to_logical_LP.tolist(),
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "ExpertPlacement":
        """The placement of `to_dict`; without `num_physical_by_rank` ranks share evenly. Raises PlacementError."""
        try:
            if record.get("format") != FORMAT:
                raise PlacementError(f"format must be {FORMAT!r}, got {record.get('format')!r}")
            sizes = record.get("num_physical_by_rank")
            return ExpertPlacement(
                physical_to_logical_LP=np.asarray(record["physical_to_logical"], dtype=np.int64),
                num_logical_experts=int(record["num_logical_experts"]),
                num_ranks=int(record["num_ranks"]),
                epoch=int(record["epoch"]),
                num_physical_by_rank=None if sizes is None else tuple(int(size) for size in sizes),
            )
        except PlacementError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlacementError(str(error)) from error

    def save(self, path: Path) -> None:
        """Write the JSON file that `load` reads."""
        path.write_text(json.dumps(self.to_dict()))

    @staticmethod
    def load(path: Path) -> "ExpertPlacement":
        """Read a placement file. Raises PlacementError naming the file and what is wrong with it."""
        try:
            return ExpertPlacement.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise PlacementError(f"placement file {path}: {error.strerror}") from error
        except ValueError as error:
            raise PlacementError(f"placement file {path}: {error}") from error
