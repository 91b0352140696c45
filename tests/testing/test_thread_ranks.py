"""Ranks as threads: collectives agree with their definition, and a rank that goes wrong fails the call."""

import pytest
import torch

from moeserve.parallel import ParallelContext
from moeserve.testing.thread_ranks import run_thread_ranks


def test_every_rank_has_its_place() -> None:
    layouts = run_thread_ranks(lambda parallel: parallel.layout, tp_size=2, dp_size=3)
    assert [layout.rank for layout in layouts] == list(range(6))
    assert [(layout.tp_rank, layout.dp_rank) for layout in layouts] == [(r % 2, r // 2) for r in range(6)]


def test_collectives() -> None:
    def run(parallel: ParallelContext) -> tuple[float, list[float], list[float], list[float]]:
        rank = float(parallel.layout.rank)
        over_tp = parallel.tp.all_reduce(torch.tensor([rank])).item()
        over_dp = parallel.dp.all_gather(torch.tensor([rank])).flatten().tolist()
        # Rank r sends r rows to rank 0, and one to every other rank.
        send = [int(rank), 1, 1, 1]
        receive = [0, 1, 2, 3] if rank == 0 else [1] * 4
        received = parallel.ep.all_to_all(torch.full((sum(send),), rank), send, receive).tolist()
        return over_tp, over_dp, received, [rank]

    results = run_thread_ranks(run, tp_size=2, dp_size=2)
    assert [result[0] for result in results] == [1.0, 1.0, 5.0, 5.0]
    assert [result[1] for result in results] == [[0.0, 2.0], [1.0, 3.0]] * 2
    assert results[0][2] == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert all(result[2] == [0.0, 1.0, 2.0, 3.0] for result in results[1:])


def test_the_cause_is_raised_and_not_the_broken_collective() -> None:
    def run(parallel: ParallelContext) -> None:
        if parallel.layout.rank == 1:
            raise ZeroDivisionError("rank 1")
        parallel.ep.all_reduce(torch.ones(1))

    with pytest.raises(ZeroDivisionError, match="rank 1"):
        run_thread_ranks(run, dp_size=3)


def test_ranks_that_disagree_on_counts_fail() -> None:
    def run(parallel: ParallelContext) -> None:
        parallel.ep.all_to_all(torch.ones(2), [1, 1], [1, 2])

    with pytest.raises(AssertionError, match="disagree"):
        run_thread_ranks(run, dp_size=2)
