"""Dispatch and combine alone, ranks as threads, experts as a formula: rows go where their expert is, once, and back."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.experts.dispatcher import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    ExpertDispatcher,
    ExpertInput,
    ReplicatedDispatcher,
    build_dispatcher,
)
from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import ParallelContext, single_rank_context
from moeserve.testing.placements import random_placement
from moeserve.testing.thread_ranks import ThreadGroup, run_thread_ranks
from moeserve_placement import ExpertPlacement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The tokens of all DP replicas of an engine, numbered through, and their routing."""

    tp_size: int
    dp_size: int
    placement: ExpertPlacement
    tokens_by_dp_rank: list[list[int]]
    expert_ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    with_partial: bool = False

    @property
    def num_tokens_by_dp_rank(self) -> tuple[int, ...]:
        return tuple(len(tokens) for tokens in self.tokens_by_dp_rank)

    @property
    def hidden_TD(self) -> torch.Tensor:
        """Column 0 is the token's number, so that whoever computes a row knows it."""
        return torch.arange(self.expert_ids_TK.shape[0], dtype=torch.float32)[:, None] + torch.tensor([[0.0, 0.5]])

    @property
    def partial_TD(self) -> torch.Tensor:
        return self.hidden_TD * -3.0

    @property
    def expected_TD(self) -> torch.Tensor:
        """Expert e multiplies by e + 1."""
        factor_T1 = (self.weights_TK.double() * (self.expert_ids_TK + 1)).sum(dim=1, keepdim=True)
        routed_TD = self.hidden_TD.double() * factor_T1
        return routed_TD + self.partial_TD.double() * self.tp_size if self.with_partial else routed_TD


Way = Callable[[ParallelContext], ExpertDispatcher[Any]]


def ways(dp_size: int) -> list[Way]:
    """All dispatchers that can serve an engine of so many replicas."""
    if dp_size == 1:
        return [lambda parallel: ReplicatedDispatcher(parallel.tp)]
    return [AllGatherDispatcher, AllToAllDispatcher]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankResult:
    output_TD: torch.Tensor
    assignments: list[tuple[int, int]]
    """(token, logical expert) of every row and k this rank's experts computed."""
    calls: list[str]


def run_case(case: Case, way: Way) -> list[RankResult]:
    def run(parallel: ParallelContext) -> RankResult:
        return run_rank(case, way, parallel)

    return run_thread_ranks(run, tp_size=case.tp_size, dp_size=case.dp_size)


def run_rank(case: Case, way: Way, parallel: ParallelContext) -> RankResult:
    layout = parallel.layout
    tokens = case.tokens_by_dp_rank[layout.dp_rank]
    tables = PlacementTables.build(case.placement, 0, rank=layout.rank, device=parallel.device)
    dispatcher = way(parallel)
    rows, record = dispatcher.dispatch(
        case.hidden_TD[tokens], case.weights_TK[tokens], case.expert_ids_TK[tokens], tables, case.num_tokens_by_dp_rank
    )
    held = torch.from_numpy(case.placement.physical_to_logical_LP[0, case.placement.rank_slice(layout.rank)].copy())
    partial_TD = case.partial_TD[tokens] if case.with_partial else None
    output_TD = dispatcher.combine(multiply(rows, held), record, partial_TD)
    groups = (parallel.tp, parallel.dp, parallel.ep)
    return RankResult(
        output_TD=output_TD,
        assignments=computed_assignments(rows, held),
        calls=[call for group in groups if isinstance(group, ThreadGroup) for call in group.calls],
    )


def multiply(rows: ExpertInput, held: torch.Tensor) -> torch.Tensor:
    """The experts: logical expert e multiplies by e + 1."""
    is_ours = rows.expert_ids_RK >= 0
    factor_RK = torch.where(is_ours, held[rows.expert_ids_RK.clamp_min(0)] + 1, 0)
    return rows.hidden_RD * (rows.weights_RK * factor_RK).sum(dim=1, keepdim=True)


def computed_assignments(rows: ExpertInput, held: torch.Tensor) -> list[tuple[int, int]]:
    return [
        (int(hidden_D[0]), int(held[local]))
        for hidden_D, local_K in zip(rows.hidden_RD, rows.expert_ids_RK, strict=True)
        for local in local_K.tolist()
        if local >= 0
    ]


def check_case(case: Case) -> list[list[RankResult]]:
    """Results of the ranks, for every way."""
    return [check_way(case, way) for way in ways(case.dp_size)]


def check_way(case: Case, way: Way) -> list[RankResult]:
    results = run_case(case, way)
    wanted = Counter((token, expert) for token, experts in enumerate(case.expert_ids_TK.tolist()) for expert in experts)
    assert Counter(assignment for result in results for assignment in result.assignments) == wanted
    for rank, result in enumerate(results):
        tokens = case.tokens_by_dp_rank[rank // case.tp_size]
        torch.testing.assert_close(result.output_TD.double(), case.expected_TD[tokens], rtol=1e-5, atol=1e-5)
        # A replica without tokens has nothing to sum over its ranks.
        assert across_replicas(result) == across_replicas(results[0]), "a rank would wait for ever"
    return results


def across_replicas(result: RankResult) -> list[str]:
    return [call for call in result.calls if call != "all_reduce"]


def make_case(
    *,
    tp_size: int,
    dp_size: int,
    num_tokens_by_dp_rank: list[int],
    num_experts: int,
    top_k: int,
    num_redundant_experts: int = 0,
    seed: int = 0,
    with_partial: bool = False,
    expert_ids_TK: torch.Tensor | None = None,
) -> Case:
    num_ranks = tp_size * dp_size
    generator = torch.Generator().manual_seed(seed)
    total = sum(num_tokens_by_dp_rank)
    bounds = np.cumsum([0, *num_tokens_by_dp_rank])
    if expert_ids_TK is None:
        expert_ids_TK = torch.rand(total, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    return Case(
        tp_size=tp_size,
        dp_size=dp_size,
        placement=random_placement(
            num_layers=1,
            num_experts=num_experts,
            num_ranks=num_ranks,
            num_redundant_experts=max(num_redundant_experts, num_ranks - num_experts),
            seed=seed,
        ),
        tokens_by_dp_rank=[list(range(a, b)) for a, b in pairwise(bounds)],
        expert_ids_TK=expert_ids_TK,
        weights_TK=torch.rand(total, top_k, generator=generator),
        with_partial=with_partial,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp_size, dp_size = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]))
    num_experts = draw(st.integers(1, 9))
    num_ranks = tp_size * dp_size
    return make_case(
        tp_size=tp_size,
        dp_size=dp_size,
        num_tokens_by_dp_rank=draw(st.lists(st.integers(0, 6), min_size=dp_size, max_size=dp_size)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(3, num_experts))),
        num_redundant_experts=draw(st.integers(0, num_experts * (num_ranks - 1))),
        seed=draw(st.integers(0, 99)),
        with_partial=draw(st.booleans()),
    )


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_every_assignment_is_computed_once_and_every_token_gets_its_sum(case: Case) -> None:
    check_case(case)


LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


@pytest.mark.parametrize(("tp_size", "dp_size"), LAYOUTS)
def test_all_tokens_to_one_expert(tp_size: int, dp_size: int) -> None:
    counts = [5] * dp_size
    case = make_case(
        tp_size=tp_size,
        dp_size=dp_size,
        num_tokens_by_dp_rank=counts,
        num_experts=6,
        top_k=1,
        expert_ids_TK=torch.full((sum(counts), 1), 4),
    )
    for results in check_case(case):
        assert sum(bool(result.assignments) for result in results) == 1, "one rank has all the work, the others none"


@pytest.mark.parametrize(("tp_size", "dp_size"), LAYOUTS)
def test_one_token_in_the_engine(tp_size: int, dp_size: int) -> None:
    case = make_case(
        tp_size=tp_size,
        dp_size=dp_size,
        num_tokens_by_dp_rank=[0] * (dp_size - 1) + [1],
        num_experts=16,
        top_k=2,
    )
    check_case(case)


@pytest.mark.parametrize(("tp_size", "dp_size"), LAYOUTS)
def test_no_token_at_all(tp_size: int, dp_size: int) -> None:
    case = make_case(tp_size=tp_size, dp_size=dp_size, num_tokens_by_dp_rank=[0] * dp_size, num_experts=4, top_k=2)
    assert all(result.output_TD.shape == (0, 2) for results in check_case(case) for result in results)


@pytest.mark.parametrize(
    ("num_experts", "tp_size", "dp_size"), [(16, 1, 3), (16, 3, 1), (5, 2, 2), (5, 1, 4), (5, 4, 1)]
)
def test_experts_that_do_not_divide_over_the_ranks(num_experts: int, tp_size: int, dp_size: int) -> None:
    case = make_case(
        tp_size=tp_size,
        dp_size=dp_size,
        num_tokens_by_dp_rank=[7, 0, 3, 1][:dp_size],
        num_experts=num_experts,
        top_k=3,
    )
    check_case(case)


def test_rows_arrive_grouped_by_source_rank_in_expert_order() -> None:
    case = make_case(tp_size=1, dp_size=2, num_tokens_by_dp_rank=[6, 6], num_experts=4, top_k=2)

    def dispatched(parallel: ParallelContext) -> list[tuple[int, int]]:
        tokens = case.tokens_by_dp_rank[parallel.layout.dp_rank]
        tables = PlacementTables.build(case.placement, 0, rank=parallel.layout.rank, device=parallel.device)
        rows, _ = AllToAllDispatcher(parallel).dispatch(
            case.hidden_TD[tokens],
            case.weights_TK[tokens],
            case.expert_ids_TK[tokens],
            tables,
            case.num_tokens_by_dp_rank,
        )
        return [
            (int(token >= 6), local)
            for token, local in zip(rows.hidden_RD[:, 0].tolist(), rows.expert_ids_RK[:, 0].tolist(), strict=True)
        ]

    for source_and_local in run_thread_ranks(dispatched, dp_size=2):
        assert source_and_local == sorted(source_and_local)


def test_tp_ranks_of_a_replica_share_the_sending() -> None:
    case = make_case(tp_size=2, dp_size=2, num_tokens_by_dp_rank=[5, 4], num_experts=4, top_k=2)

    def sent(parallel: ParallelContext) -> list[int]:
        tokens = case.tokens_by_dp_rank[parallel.layout.dp_rank]
        tables = PlacementTables.build(case.placement, 0, rank=parallel.layout.rank, device=parallel.device)
        dispatcher = AllToAllDispatcher(parallel)
        rows, record = dispatcher.dispatch(
            case.hidden_TD[tokens],
            case.weights_TK[tokens],
            case.expert_ids_TK[tokens],
            tables,
            case.num_tokens_by_dp_rank,
        )
        dispatcher.combine(rows.hidden_RD, record, None)
        sent_tokens: slice = record.sent_tokens
        return tokens[sent_tokens]

    assert run_thread_ranks(sent, tp_size=2, dp_size=2) == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "calls"),
    [
        (1, 1, [[]]),
        (2, 1, [["all_reduce"]]),
        (1, 2, [["all_gather", "reduce_scatter"], ["all_to_all"] * 3]),
        (2, 2, [["all_reduce", "all_gather", "reduce_scatter"], ["all_reduce"] + ["all_to_all"] * 3]),
    ],
)
@pytest.mark.parametrize("with_partial", [False, True])
def test_number_of_collectives_in_a_layer(
    tp_size: int, dp_size: int, calls: list[list[str]], with_partial: bool
) -> None:
    case = make_case(
        tp_size=tp_size,
        dp_size=dp_size,
        num_tokens_by_dp_rank=[3] * dp_size,
        num_experts=4,
        top_k=2,
        with_partial=with_partial,
    )
    assert [[result.calls for result in results] for results in check_case(case)] == [
        [calls_of_way] * (tp_size * dp_size) for calls_of_way in calls
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_travel_apart_are_weighted_in_float32(dtype: torch.dtype) -> None:
    """Weights of 1/3 and 2/3 sum to the row itself; rounded to bfloat16 first, they would not."""
    placement = random_placement(num_layers=1, num_experts=2, num_ranks=2)
    hidden_TD = torch.linspace(1.0, 4.0, 33).to(dtype)[:, None].expand(-1, 2).contiguous()

    def run(parallel: ParallelContext) -> torch.Tensor:
        tables = PlacementTables.build(placement, 0, rank=parallel.layout.rank, device=parallel.device)
        dispatcher = AllToAllDispatcher(parallel)
        rows, record = dispatcher.dispatch(
            hidden_TD,
            torch.tensor([[1 / 3, 2 / 3]]).expand(33, -1),
            torch.tensor([[0, 1]]).expand(33, -1),
            tables,
            (33, 33),
        )
        return dispatcher.combine(rows.hidden_RD, record, None)

    for output_TD in run_thread_ranks(run, dp_size=2):
        assert output_TD.dtype == dtype
        assert torch.equal(output_TD, hidden_TD)


def test_single_rank_makes_no_collective_and_sees_its_own_tensors() -> None:
    placement = ExpertPlacement.identity(num_layers=1, num_logical_experts=3, num_ranks=1)
    tables = PlacementTables.build(placement, 0, rank=0, device=torch.device("cpu"))
    hidden_TD = torch.ones(2, 4)
    expert_ids_TK = torch.tensor([[2, 0], [1, 2]])
    dispatcher = build_dispatcher(single_rank_context(), top_k=2)
    rows, _ = dispatcher.dispatch(hidden_TD, torch.ones(2, 2), expert_ids_TK, tables, (2,))
    assert rows.hidden_RD is hidden_TD
    assert torch.equal(rows.expert_ids_RK, expert_ids_TK)
