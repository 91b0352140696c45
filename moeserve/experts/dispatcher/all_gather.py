"""Dispatch by all-gather: every rank gets the tokens of all replicas and computes its own experts for them.

Axes as in `moeserve.experts.dispatcher.interface`; M most tokens of a replica in this step, G replicas.
"""

import torch
from torch.nn import functional

from moeserve.experts.dispatcher.interface import ExpertInput
from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import ParallelContext


class AllGatherDispatcher:
    """Tokens padded to the longest replica's, one all-gather of them with their routing, one reduce-scatter back.

    A token travels once, not once for each of its experts, so with few replicas less is moved than by all-to-all. All
    shapes follow from the step's token counts, which everybody knows: nothing waits for the device.
    """

    def __init__(self, parallel: ParallelContext) -> None:
        self._tp = parallel.tp
        self._dp = parallel.dp
        # Replicas start at different rows, so that their first tokens (all of them in decode) spread over the copies.
        self._first_row = parallel.layout.dp_rank

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        tables: PlacementTables,
        num_tokens_by_dp_rank: tuple[int, ...],
        *,
        has_fixed_shapes: bool = False,
    ) -> tuple[ExpertInput, int]:
        """The record is T."""
        num_tokens = expert_ids_TK.shape[0]
        num_padding = max(num_tokens_by_dp_rank) - num_tokens
        physical_TK = tables.choose_physical(expert_ids_TK, self._first_row)
        hidden_GMD, weights_GMK, physical_GMK = self._dp.all_gather_each(
            (_pad(hidden_TD, num_padding, 0.0), _pad(weights_TK, num_padding, 0.0), _pad(physical_TK, num_padding, -1))
        )
        rows = ExpertInput(
            hidden_RD=hidden_GMD.flatten(0, 1),
            weights_RK=weights_GMK.flatten(0, 1),
            expert_ids_RK=tables.local_of_physical[physical_GMK.flatten(0, 1)],
        )
        return rows, num_tokens

    def combine(self, output_RD: torch.Tensor, record: int, partial_TD: torch.Tensor | None) -> torch.Tensor:
        summed_MD = self._dp.reduce_scatter(output_RD.unflatten(0, (self._dp.size, -1)))
        summed_TD = summed_MD[:record]
        return self._tp.all_reduce(summed_TD if partial_TD is None else partial_TD.add_(summed_TD))


def _pad(x_TN: torch.Tensor, num_rows: int, value: float) -> torch.Tensor:
    return functional.pad(x_TN, (0, 0, 0, num_rows), value=value) if num_rows else x_TN
