"""Dispatch where all ranks hold the same tokens: nothing travels before the sum.

Axes as in `moeserve.experts.dispatcher.interface`.
"""

import torch

from moeserve.experts.dispatcher.interface import ExpertInput
from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import Group


class ReplicatedDispatcher:
    """Each rank computes its own experts for all tokens, and one all-reduce adds them up.

    A rank alone is the base case: it owns every expert, and the all-reduce is the identity.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        tables: PlacementTables,
        num_tokens_by_dp_rank: tuple[int, ...],
        *,
        has_fixed_shapes: bool = False,
    ) -> tuple[ExpertInput, None]:
        local_TK = tables.choose_local(expert_ids_TK, first_row=0)
        return ExpertInput(hidden_RD=hidden_TD, weights_RK=weights_TK, expert_ids_RK=local_TK), None

    def combine(self, output_RD: torch.Tensor, record: None, partial_TD: torch.Tensor | None) -> torch.Tensor:
        return self._group.all_reduce(output_RD if partial_TD is None else partial_TD.add_(output_RD))
