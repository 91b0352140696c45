"""Dispatch by all-to-all: every (token, expert) row travels to the rank of its expert and back.

Axes as in `moeserve.experts.dispatcher.interface`; N those of the T tokens that this rank sends, P physical experts
of the EP group, p those of this rank.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from moeserve.experts.dispatcher.interface import ExpertInput
from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import ParallelContext, shard_range
from moeserve_kernels import moe_align


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllToAllRecord:
    """How one layer's rows travelled: what combine needs to send them back."""

    num_tokens: int
    sent_tokens: slice
    """The replica's tokens this rank sent."""
    weights_NK: torch.Tensor
    assignment_of_row: torch.Tensor
    """int64 [N * K], the (token, k) of each sent row: rows are sorted by physical expert."""
    num_sent_to: list[int]
    """Rows for each rank."""
    num_received_from: list[int]


class AllToAllDispatcher:
    """Each rank sends a share of its replica's tokens to the ranks of their experts, and gets them back.

    One row travels for each (token, k), sorted by physical expert. The counts that all-to-all needs are exchanged for
    each physical expert, not for each rank: they also tell the receiver which expert a row is for.
    """

    def __init__(self, parallel: ParallelContext) -> None:
        self._tp = parallel.tp
        self._ep = parallel.ep
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
    ) -> tuple[ExpertInput, AllToAllRecord]:
        assert not has_fixed_shapes, "who gets how many rows is known on the host, and differs from step to step"
        num_tokens, top_k = expert_ids_TK.shape
        sent = shard_range(num_tokens, self._tp.size, self._tp.rank)
        physical_NK = tables.choose_physical(expert_ids_TK[sent], self._first_row + sent.start)
        num_by_rank = tables.num_physical_by_rank
        assignment_of_row, send_counts_P = moe_align(physical_NK.flatten(), sum(num_by_rank))
        num_local = num_by_rank[self._ep.rank]
        receive_counts = self._ep.all_to_all(send_counts_P, list(num_by_rank), [num_local] * self._ep.size)

        # The one wait for the device in a layer: all-to-all takes its counts on the host.
        counts = torch.cat((send_counts_P, receive_counts)).tolist()
        num_physical = send_counts_P.shape[0]
        num_sent_to = _sum_runs(counts[:num_physical], num_by_rank)
        num_received_from = _sum_runs(counts[num_physical:], [num_local] * self._ep.size)

        sent_RD = hidden_TD[sent].index_select(0, assignment_of_row // top_k)
        received_RD = self._ep.all_to_all(sent_RD, num_sent_to, num_received_from)
        num_received = sum(num_received_from)
        local_R = tables.local_of_run.repeat_interleave(receive_counts, output_size=num_received)
        rows = ExpertInput(
            hidden_RD=received_RD,
            weights_RK=weights_TK.new_ones(num_received, 1),
            expert_ids_RK=local_R[:, None],
        )
        record = AllToAllRecord(
            num_tokens=num_tokens,
            sent_tokens=sent,
            weights_NK=weights_TK[sent],
            assignment_of_row=assignment_of_row,
            num_sent_to=num_sent_to,
            num_received_from=num_received_from,
        )
        return rows, record

    def combine(self, output_RD: torch.Tensor, record: AllToAllRecord, partial_TD: torch.Tensor | None) -> torch.Tensor:
        returned_RD = self._ep.all_to_all(output_RD, record.num_received_from, record.num_sent_to)
        # Back in (token, k) order before the sum: its rounding then does not depend on the placement.
        rows = torch.arange(len(returned_RD), device=returned_RD.device)
        row_of_assignment = torch.empty_like(rows).scatter_(0, record.assignment_of_row, rows)
        by_assignment = returned_RD.index_select(0, row_of_assignment)
        expert_outputs_NKD = by_assignment.view(*record.weights_NK.shape, output_RD.shape[1]).float()
        routed_ND = torch.bmm(record.weights_NK[:, None], expert_outputs_NKD).squeeze(1)
        if partial_TD is None:
            if self._tp.size == 1:
                return routed_ND.to(output_RD.dtype)
            partial_TD = output_RD.new_zeros(record.num_tokens, output_RD.shape[1])
        partial_TD[record.sent_tokens].add_(routed_ND)
        return self._tp.all_reduce(partial_TD)


def _sum_runs(values: list[int], lengths: tuple[int, ...] | list[int]) -> list[int]:
    """Sums of consecutive runs of `values`."""
    bounds = accumulate(lengths, initial=0)
    return [sum(values[start:stop]) for start, stop in pairwise(bounds)]
