"""The choice between all-gather and all-to-all: few tokens or few replicas are gathered, and all ranks choose alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeserve.experts.dispatcher import build_dispatcher, goes_by_all_gather
from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import ParallelContext
from moeserve.testing.placements import random_placement
from moeserve.testing.thread_ranks import ThreadGroup, run_thread_ranks

counts = st.integers(0, 10_000)


@given(lengths=st.lists(st.integers(0, 64), min_size=2, max_size=40), top_k=st.integers(1, 16))
def test_decode_is_gathered_whoever_idles(lengths: list[int], top_k: int) -> None:
    assert goes_by_all_gather(lengths, top_k=top_k)


@given(lengths=st.lists(counts, min_size=2, max_size=8))
def test_few_replicas_are_gathered_however_uneven(lengths: list[int]) -> None:
    assert goes_by_all_gather(lengths, top_k=8)


@given(length=st.integers(65, 10_000), num_replicas=st.integers(2, 64), top_k=st.integers(1, 16))
def test_even_prefill_is_gathered_up_to_eight_replicas_for_each_expert_of_a_token(
    length: int, num_replicas: int, top_k: int
) -> None:
    assert goes_by_all_gather([length] * num_replicas, top_k=top_k) == (num_replicas <= 8 * top_k)


@given(lengths=st.lists(counts, min_size=2, max_size=20), top_k=st.integers(1, 4), index=st.integers(0, 19))
def test_more_tokens_beside_the_longest_never_speak_against_all_gather(
    lengths: list[int], top_k: int, index: int
) -> None:
    evened = list(lengths)
    evened[index % len(lengths)] = max(lengths)
    assert goes_by_all_gather(evened, top_k=top_k) >= goes_by_all_gather(lengths, top_k=top_k)


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        pytest.param((65, 65, 65, 65), ["all_gather", "reduce_scatter"], id="even"),
        pytest.param((64, 0, 0, 0), ["all_gather", "reduce_scatter"], id="few tokens"),
        pytest.param((0, 65, 0, 0), ["all_to_all"] * 3, id="one long prefill among idle replicas"),
    ],
)
def test_all_ranks_go_the_chosen_way_and_get_the_sum(lengths: tuple[int, ...], calls: list[str]) -> None:
    """Every expert gives back its rows, and each token's one weight is 1: so the sum is the token itself."""
    placement = random_placement(num_layers=1, num_experts=5, num_ranks=4)

    def run(parallel: ParallelContext) -> list[str]:
        rank = parallel.layout.rank
        tables = PlacementTables.build(placement, 0, rank=rank, device=parallel.device)
        hidden_TD = torch.randn(lengths[rank], 3)
        dispatcher = build_dispatcher(parallel, top_k=1)
        rows, record = dispatcher.dispatch(
            hidden_TD, torch.ones(lengths[rank], 1), torch.arange(lengths[rank])[:, None] % 5, tables, lengths
        )
        is_ours = (rows.expert_ids_RK >= 0).float()
        assert torch.equal(dispatcher.combine(rows.hidden_RD * is_ours, record, None), hidden_TD)
        return [call for group in (parallel.dp, parallel.ep) if isinstance(group, ThreadGroup) for call in group.calls]

    assert run_thread_ranks(run, dp_size=4) == [calls] * 4


def test_with_fixed_shapes_nothing_but_all_gather_is_done() -> None:
    """Also where counts speak for all-to-all; choices of nobody, among others, get nothing."""
    lengths = (0, 65, 0, 0)
    placement = random_placement(num_layers=1, num_experts=5, num_ranks=4)
    expert_ids_TK = torch.arange(-1, 64)[:, None] % 6 - 1

    def run(parallel: ParallelContext) -> list[str]:
        rank = parallel.layout.rank
        tables = PlacementTables.build(placement, 0, rank=rank, device=parallel.device)
        hidden_TD, ids_TK = torch.randn(lengths[rank], 3), expert_ids_TK[: lengths[rank]]
        dispatcher = build_dispatcher(parallel, top_k=1)
        rows, record = dispatcher.dispatch(
            hidden_TD, torch.ones(ids_TK.shape), ids_TK, tables, lengths, has_fixed_shapes=True
        )
        is_ours = (rows.expert_ids_RK >= 0).float()
        combined_TD = dispatcher.combine(rows.hidden_RD * is_ours, record, None)
        assert torch.equal(combined_TD, hidden_TD * (ids_TK >= 0))
        return [call for group in (parallel.dp, parallel.ep) if isinstance(group, ThreadGroup) for call in group.calls]

    assert not goes_by_all_gather(lengths, top_k=1)
    assert run_thread_ranks(run, dp_size=4) == [["all_gather", "reduce_scatter"]] * 4
