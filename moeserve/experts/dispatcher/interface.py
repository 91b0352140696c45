"""What every dispatcher takes and gives.

Axes: T tokens of this DP replica, K top-k, D model width, R rows routed to this rank.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from moeserve.experts.placement_tables import PlacementTables

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertInput:
    """Rows for this rank's experts: each row goes through its k experts and comes back as their weighted sum."""

    hidden_RD: torch.Tensor
    weights_RK: torch.Tensor
    """float32."""
    expert_ids_RK: torch.Tensor
    """int64, places in this rank's expert store; -1: not ours, adds nothing."""


class ExpertDispatcher(Protocol[RecordT]):
    """One way to bring tokens to experts. Every rank of the EP group calls dispatch and combine of every layer in the
    same order."""

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        tables: PlacementTables,
        num_tokens_by_dp_rank: tuple[int, ...],
        *,
        has_fixed_shapes: bool = False,
    ) -> tuple[ExpertInput, RecordT]:
        """Bring the replica's tokens to their experts.

        hidden_TD, weights_TK and the logical expert_ids_TK are the same on all tp ranks of the replica; T, which is
        num_tokens_by_dp_rank[dp_rank], may be 0. has_fixed_shapes: neither shapes nor what
        is launched may follow from the contents of a tensor, and an expert id may be -1, which is nobody.
        """
        ...

    def combine(self, output_RD: torch.Tensor, record: RecordT, partial_TD: torch.Tensor | None) -> torch.Tensor:
        """Bring the experts' output back: [T, D], the same on all tp ranks of the replica.

        partial_TD: this tp rank's addend of another sum over tp (the shared experts'), taken along so that both sums
        cost one all-reduce; it is consumed.
        """
        ...
