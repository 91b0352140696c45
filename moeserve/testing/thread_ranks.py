"""Ranks as threads of one process: collectives without a process group, fast enough for property-based tests."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from moeserve.parallel import Group, ParallelContext, ParallelLayout

T = TypeVar("T")

_TIMEOUT_S = 20.0
"""How long a rank waits for the others before it calls the collective broken."""


def run_thread_ranks(fn: Callable[[ParallelContext], T], *, tp_size: int = 1, dp_size: int = 1) -> list[T]:
    """`fn` of every rank's context, in rank order, all running at once.

    A collective that not every member enters, or in which members disagree on counts, fails the call. The first error
    of a rank's own is raised rather than the broken collectives it left behind.
    """
    world_size = tp_size * dp_size
    layouts = [ParallelLayout(tp_size=tp_size, dp_size=dp_size, rank=rank) for rank in range(world_size)]
    tp = [_Exchange(tp_size) for _ in range(dp_size)]
    dp = [_Exchange(dp_size) for _ in range(tp_size)]
    ep = _Exchange(world_size)

    def run(layout: ParallelLayout) -> T:
        context = ParallelContext(
            layout,
            torch.device("cpu"),
            tp=ThreadGroup(tp[layout.dp_rank], layout.tp_rank),
            dp=ThreadGroup(dp[layout.tp_rank], layout.dp_rank),
            ep=ThreadGroup(ep, layout.rank),
        )
        try:
            return fn(context)
        except BaseException:
            for exchange in (*tp, *dp, ep):
                exchange.abort()
            raise

    with ThreadPoolExecutor(max_workers=world_size) as pool:
        futures = [pool.submit(run, layout) for layout in layouts]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class ThreadGroup(Group):
    """A group whose members are threads; notes the collectives it was asked for."""

    def __init__(self, exchange: "_Exchange", rank: int) -> None:
        super().__init__(None, size=1, rank=0)
        self.size = exchange.size
        self.rank = rank
        self.calls: list[str] = []
        self._exchange = exchange

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1 and x.numel() > 0:
            self.calls.append("all_reduce")
            x.copy_(torch.stack(self._swap(x.clone())).sum(dim=0))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            self.calls.append("all_gather")
        return torch.stack(self._swap(x))

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        if self.size > 1:
            self.calls.append("all_to_all")
        assert sum(send_counts) == x.shape[0]
        received = [pieces[self.rank] for pieces in self._swap(torch.split(x, send_counts))]
        assert [piece.shape[0] for piece in received] == receive_counts, "sender and receiver disagree"
        return torch.cat(received)

    def _swap(self, value: T) -> list[T]:
        return self._exchange.swap(self.rank, value)


class _Exchange:
    """Every member puts a value and gets all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self._values: dict[int, object] = {}

    def swap(self, rank: int, value: T) -> list[T]:
        self._values[rank] = value
        self._barrier.wait()
        values = [self._values[member] for member in range(self.size)]
        self._barrier.wait()  # nobody overwrites a value that another has not read
        return values  # type: ignore[return-value]  # all members put the same type

    def abort(self) -> None:
        self._barrier.abort()
