"""Which way a step's tokens go to their experts where DP replicas hold different ones."""

from collections.abc import Sequence
from typing import Any

import torch

from moeserve.experts.dispatcher.all_gather import AllGatherDispatcher
from moeserve.experts.dispatcher.all_to_all import AllToAllDispatcher
from moeserve.experts.dispatcher.interface import ExpertDispatcher, ExpertInput
from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import ParallelContext

_FEW_TOKENS = 64
"""Of a replica: up to here the two collectives more and the wait for the device make all-to-all the slower."""
_COPIES_OF_A_ROW = 8
"""A row that is sorted, sent, put back and weighed costs about as much as so many that are copied; measured on CPUs."""


def goes_by_all_gather(num_tokens_by_dp_rank: Sequence[int], *, top_k: int) -> bool:
    """Whether all-gather is the faster way for a step, else all-to-all. All ranks know the arguments, so they agree.

    By all-gather every rank gets the tokens of all replicas, padded to the longest: shapes are fixed by the counts, and
    a token is copied once for each replica. By all-to-all a rank gets one row for each of its (token, expert) pairs, in
    the mean top_k / replicas rows a token, wherever the tokens are. So all-gather is for decode, for prefill while
    replicas are few or evenly loaded; all-to-all is for long prefills of few among many replicas.
    """
    num_replicas, longest = len(num_tokens_by_dp_rank), max(num_tokens_by_dp_rank)
    gathered_rows = num_replicas * longest
    exchanged_rows = top_k * sum(num_tokens_by_dp_rank) / num_replicas
    return longest <= _FEW_TOKENS or gathered_rows <= _COPIES_OF_A_ROW * exchanged_rows


class DispatcherByStep:
    """All-gather or all-to-all, whichever is the faster way for the step; with fixed shapes there is but the first."""

    def __init__(self, parallel: ParallelContext, *, top_k: int) -> None:
        self._all_gather = AllGatherDispatcher(parallel)
        self._all_to_all = AllToAllDispatcher(parallel)
        self._top_k = top_k

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        tables: PlacementTables,
        num_tokens_by_dp_rank: tuple[int, ...],
        *,
        has_fixed_shapes: bool = False,
    ) -> tuple[ExpertInput, tuple[ExpertDispatcher[Any], Any]]:
        """The record is the way that was taken, and its own record."""
        by_all_gather = has_fixed_shapes or goes_by_all_gather(num_tokens_by_dp_rank, top_k=self._top_k)
        way: ExpertDispatcher[Any] = self._all_gather if by_all_gather else self._all_to_all
        rows, record = way.dispatch(
            hidden_TD, weights_TK, expert_ids_TK, tables, num_tokens_by_dp_rank, has_fixed_shapes=has_fixed_shapes
        )
        return rows, (way, record)

    def combine(
        self, output_RD: torch.Tensor, record: tuple[ExpertDispatcher[Any], Any], partial_TD: torch.Tensor | None
    ) -> torch.Tensor:
        way, own_record = record
        return way.combine(output_RD, own_record, partial_TD)
