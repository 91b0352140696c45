"""Dispatch tokens to the ranks of their experts, and combine what the experts made of them.

Between the two stands a frozen record of how the rows travelled; the experts in between see rows with local expert ids
and never learn which transport ran.

Axes: T tokens of this DP replica, N those of them this rank sends, K top-k, D model width, P physical experts of the
EP group, p those of this rank, R rows routed to this rank.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch

from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import Group, ParallelContext, shard_range
from moeserve_kernels import moe_align

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
    """One transport. Every rank of the EP group calls dispatch and combine of every layer in the same order."""

    def dispatch(
        self,
        hidden_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        tables: PlacementTables,
    ) -> tuple[ExpertInput, RecordT]:
        """Bring the replica's tokens to their experts.

        hidden_TD, weights_TK and the logical expert_ids_TK are the same on all tp ranks of the replica; T may be 0.
        """
        ...

    def combine(self, output_RD: torch.Tensor, record: RecordT, partial_TD: torch.Tensor | None) -> torch.Tensor:
        """Bring the experts' output back: [T, D], the same on all tp ranks of the replica.

        partial_TD: this tp rank's addend of another sum over tp (the shared experts'), taken along so that both sums
        cost one all-reduce; it is consumed.
        """
        ...


def build_dispatcher(parallel: ParallelContext) -> ExpertDispatcher[Any]:
    """The transport of a layout: tokens travel only where DP replicas hold different ones."""
    return ReplicatedDispatcher(parallel.tp) if parallel.layout.dp_size == 1 else AllToAllDispatcher(parallel)


class ReplicatedDispatcher:
    """All ranks hold all tokens: each computes its own experts, and one all-reduce adds them up.

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
    ) -> tuple[ExpertInput, None]:
        local_TK = tables.choose_local(expert_ids_TK, first_row=0)
        return ExpertInput(hidden_RD=hidden_TD, weights_RK=weights_TK, expert_ids_RK=local_TK), None

    def combine(self, output_RD: torch.Tensor, record: None, partial_TD: torch.Tensor | None) -> torch.Tensor:
        return self._group.all_reduce(output_RD if partial_TD is None else partial_TD.add_(output_RD))


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
    ) -> tuple[ExpertInput, AllToAllRecord]:
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
        by_assignment = torch.empty_like(returned_RD).index_copy_(0, record.assignment_of_row, returned_RD)
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
