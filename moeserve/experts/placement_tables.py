"""The placement of one MoE layer as tensors: from (logical expert, token row) to a physical expert.

A logical expert with replicas is looked up in one of `num_buckets` columns, chosen by the token's row; replicas share
the columns by their weights. The answer depends on nothing but the row and the expert, so all ranks that hold the same
tokens agree without talking.

Axes: E logical experts, P physical experts of the EP group, p those of this rank, J replicas, C buckets, T tokens, K
top-k.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeserve_placement import ExpertPlacement

NUM_BUCKETS = 64
"""Columns for each logical expert of a layer with replicas: 3 replicas of one weight get 22, 21 and 21 of them."""

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementTables:
    """What a rank must know of one layer's placement to route its tokens.

    Their shapes follow from that of the placement, so that another one can take force in the same memory: a step that
    was captured with the tables reads what they hold now.
    """

    num_physical_by_rank: tuple[int, ...]
    """Physical experts of each rank of the EP group; ids are contiguous per rank."""
    physical_EC: torch.Tensor
    """int64 [E + 1, C], physical expert of a logical expert and bucket; C is 1 where there is no room for replicas. The
    last row, which id -1 finds, is -1."""
    local_EC: torch.Tensor
    """int64, the same as a place in this rank's expert store; -1 where another rank holds it."""
    local_of_run: torch.Tensor
    """int64 [ranks * p], this rank's places for each rank: rows that arrive are runs of one source rank and expert."""
    local_of_physical: torch.Tensor
    """int64 [P + 1], a physical expert as a place in this rank's store, -1 where another rank holds it. The last, which
    id -1 finds, is -1."""

    @staticmethod
    def build(
        placement: ExpertPlacement,
        moe_layer: int,
        *,
        rank: int,
        device: torch.device,
        place_of_local_p: Int64s | None = None,
        split_P: Floats | None = None,
    ) -> "PlacementTables":
        """Tables of one layer as `rank` of the EP group sees them.

        moe_layer: index among the MoE layers, the placement's layer axis. place_of_local_p: where in the rank's store
        its physical experts lie; None: in order. split_P: share of its logical expert's tokens that each physical
        expert takes, only proportions count; None: all alike.
        """
        held = placement.rank_slice(rank)
        places_p = np.arange(held.stop - held.start) if place_of_local_p is None else place_of_local_p
        local_of_physical = np.full(placement.num_physical_experts + 1, -1)
        local_of_physical[held] = places_p
        num_buckets = max(NUM_BUCKETS, placement.num_ranks) if placement.num_redundant_experts else 1
        by_bucket_EC = _physical_by_bucket(placement.logical_to_physical_LEC[moe_layer], split_P, num_buckets)
        physical_EC = np.concatenate([by_bucket_EC, np.full((1, num_buckets), -1)])
        return PlacementTables(
            num_physical_by_rank=tuple(placement.num_physical_R.tolist()),
            physical_EC=torch.from_numpy(physical_EC).to(device),
            local_EC=torch.from_numpy(local_of_physical[physical_EC]).to(device),
            local_of_run=torch.from_numpy(np.tile(places_p, placement.num_ranks)).to(device),
            local_of_physical=torch.from_numpy(local_of_physical).to(device),
        )

    @torch.inference_mode()
    def take_over(self, other: "PlacementTables") -> None:
        """Hold what the other ones hold, which are of a placement of the same shape, in the memory that is there."""
        assert self.num_physical_by_rank == other.num_physical_by_rank
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            assert mine.shape == theirs.shape, f"a placement of another shape: {theirs.shape}, not {mine.shape}"
            mine.copy_(theirs)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.physical_EC, self.local_EC, self.local_of_run, self.local_of_physical

    def choose_physical(self, expert_ids_TK: torch.Tensor, first_row: int) -> torch.Tensor:
        """Physical experts [T, K] for tokens that stand in rows first_row, first_row + 1, ...; -1 for an id of -1."""
        return _choose(self.physical_EC, expert_ids_TK, first_row)

    def choose_local(self, expert_ids_TK: torch.Tensor, first_row: int) -> torch.Tensor:
        """The same choice as places in this rank's expert store, -1 for other ranks' experts."""
        return _choose(self.local_EC, expert_ids_TK, first_row)


def _choose(table_EC: torch.Tensor, expert_ids_TK: torch.Tensor, first_row: int) -> torch.Tensor:
    num_buckets = table_EC.shape[1]
    if num_buckets == 1:
        return table_EC[:, 0].take(expert_ids_TK)
    # Consecutive rows take the buckets in turn: more even than a scrambling hash, and as deterministic.
    num_tokens = expert_ids_TK.shape[0]
    bucket_T = torch.arange(first_row, first_row + num_tokens, device=table_EC.device) % num_buckets
    return table_EC[expert_ids_TK, bucket_T[:, None]]


def _physical_by_bucket(physical_EJ: Int64s, split_P: Floats | None, num_buckets: int) -> Int64s:
    """[E, C], one replica for each bucket; physical_EJ is filled up with -1 behind an expert's last replica.

    Replicas get whole buckets by the largest remainder, and stand as evenly among those of the others as they can.
    """
    is_replica_EJ = physical_EJ >= 0
    num_experts, most = physical_EJ.shape
    if num_buckets == 1:
        return physical_EJ
    weight_EJ = (
        is_replica_EJ.astype(np.float64) if split_P is None else np.where(is_replica_EJ, split_P[physical_EJ], 0)
    )
    count_EJ = _shares(weight_EJ, num_buckets)
    replica = np.repeat(np.tile(np.arange(most), num_experts), count_EJ.ravel())
    expert = np.repeat(np.arange(num_experts), num_buckets)
    first_EJ = np.cumsum(count_EJ).reshape(count_EJ.shape) - count_EJ
    nth = np.arange(replica.size) - first_EJ[expert, replica]
    # The nth of an expert's n buckets belongs at (nth + 1/2) / n of the way.
    order = np.lexsort((replica, (nth + 0.5) / count_EJ[expert, replica], expert))
    physical_EC: Int64s = physical_EJ[expert, replica[order]].reshape(num_experts, num_buckets)
    return physical_EC


def _shares(weight_EJ: Floats, total: int) -> Int64s:
    """Whole numbers in proportion to the weights of each row, `total` a row."""
    exact_EJ = weight_EJ / weight_EJ.sum(axis=1, keepdims=True) * total
    count_EJ = np.floor(exact_EJ).astype(np.int64)
    # Rank of each remainder in its row, largest first; the first replica wins a tie.
    rank_EJ = np.argsort(np.argsort(count_EJ - exact_EJ, axis=1, kind="stable"), axis=1, kind="stable")
    missing_E1 = total - count_EJ.sum(axis=1, keepdims=True)
    whole_EJ: Int64s = count_EJ + (rank_EJ < missing_E1)
    return whole_EJ
