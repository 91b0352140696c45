"""The placement of one MoE layer as tensors: from (logical expert, token row) to a physical expert.

A logical expert with replicas is looked up in one of `num_buckets` columns, chosen by the token's row; replicas share
the columns evenly. The answer depends on nothing but the row and the expert, so all ranks that hold the same tokens
agree without talking.

Axes: E logical experts, P physical experts of the EP group, C buckets, T tokens, K top-k.
"""

from dataclasses import dataclass

import numpy as np
import torch

from moeserve_placement import ExpertPlacement

NUM_BUCKETS = 64
"""Columns for each logical expert of a layer with replicas: 3 replicas get 22, 21 and 21 of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementTables:
    """What a rank must know of one layer's placement to route its tokens; replaced as a whole at an epoch commit."""

    epoch: int
    num_physical_by_rank: tuple[int, ...]
    """Physical experts of each rank of the EP group; ids are contiguous per rank."""
    physical_EC: torch.Tensor
    """int64, physical expert of a logical expert and bucket; C is 1 where no expert of the layer has replicas."""
    local_EC: torch.Tensor
    """int64, the same as a place in this rank's expert store; -1 where another rank holds it."""
    local_of_run: torch.Tensor
    """int64 [ranks * p], 0 .. p - 1 for each rank: rows that arrive are runs of one source rank and local expert."""

    @staticmethod
    def build(placement: ExpertPlacement, moe_layer: int, *, rank: int, device: torch.device) -> "PlacementTables":
        """Tables of one layer as `rank` of the EP group sees them.

        moe_layer: index among the MoE layers, the placement's layer axis.
        """
        num_replicas_E = placement.num_replicas_LE[moe_layer]
        most = int(num_replicas_E.max())
        bucket_C = np.arange(1 if most == 1 else max(NUM_BUCKETS, most))
        replica_EC = bucket_C % num_replicas_E[:, None]
        physical_EC = np.take_along_axis(placement.logical_to_physical_LEC[moe_layer], replica_EC, axis=1)
        held = placement.rank_slice(rank)
        is_local_EC = (physical_EC >= held.start) & (physical_EC < held.stop)
        local_of_run = torch.arange(held.stop - held.start).repeat(placement.num_ranks)
        slices = [placement.rank_slice(r) for r in range(placement.num_ranks)]
        return PlacementTables(
            epoch=placement.epoch,
            num_physical_by_rank=tuple(s.stop - s.start for s in slices),
            physical_EC=torch.from_numpy(physical_EC).to(device),
            local_EC=torch.from_numpy(np.where(is_local_EC, physical_EC - held.start, -1)).to(device),
            local_of_run=local_of_run.to(device),
        )

    def choose_physical(self, expert_ids_TK: torch.Tensor, first_row: int) -> torch.Tensor:
        """Physical experts [T, K] for tokens that stand in rows first_row, first_row + 1, ..."""
        return _choose(self.physical_EC, expert_ids_TK, first_row)

    def choose_local(self, expert_ids_TK: torch.Tensor, first_row: int) -> torch.Tensor:
        """The same choice as places in this rank's expert store, -1 for other ranks' experts."""
        return _choose(self.local_EC, expert_ids_TK, first_row)


def _choose(table_EC: torch.Tensor, expert_ids_TK: torch.Tensor, first_row: int) -> torch.Tensor:
    num_buckets = table_EC.shape[1]
    if num_buckets == 1:
        return table_EC[:, 0][expert_ids_TK]
    # Consecutive rows take the buckets in turn: more even than a scrambling hash, and as deterministic.
    num_tokens = expert_ids_TK.shape[0]
    bucket_T = torch.arange(first_row, first_row + num_tokens, device=table_EC.device) % num_buckets
    return table_EC[expert_ids_TK, bucket_T[:, None]]
