"""The multi-process harness itself: results in rank order, failures that name their rank, nothing left running."""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from moeserve.parallel import ParallelLayout, init_parallel
from moeserve.testing.multiprocess import RankError, run_ranks

pytestmark = pytest.mark.distributed


def _sum_of_ranks(rank: int, scale: int) -> torch.Tensor:
    parallel = init_parallel(ParallelLayout(tp_size=dist.get_world_size(), dp_size=1, rank=rank), torch.device("cpu"))
    return parallel.tp.all_reduce(torch.tensor([rank * scale]))


def _rank_of_result(rank: int) -> int:
    return rank


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("the odd one out")
    dist.barrier()


def _one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_ranks_share_one_group() -> None:
    assert [int(result) for result in run_ranks(_sum_of_ranks, 2, 10)] == [10, 10]


def test_results_come_in_rank_order() -> None:
    assert run_ranks(_rank_of_result, 3) == [0, 1, 2]


def test_exception_of_a_rank_reaches_the_caller() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*the odd one out"):
        run_ranks(_one_raises, 2)
    assert not multiprocessing.active_children()


def test_death_of_a_rank_reaches_the_caller() -> None:
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        run_ranks(_one_dies, 2)
    assert not multiprocessing.active_children()


def test_deadline_ends_all_ranks() -> None:
    with pytest.raises(RankError, match="did not finish"):
        run_ranks(_stuck, 1, timeout_s=4.0)
    assert not multiprocessing.active_children()


def _stuck(rank: int) -> None:
    multiprocessing.Event().wait(600)
