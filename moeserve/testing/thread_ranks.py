"""Ranks as threads of one process: collectives without a process group, fast enough for property-based tests."""

import threading
from collections.abc import Callable, Sequence
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
        transport = _ThreadTransport(exchange, rank)
        super().__init__(transport if exchange.size > 1 else None, size=exchange.size, rank=rank)
        self.calls = transport.calls


class _ThreadTransport:
    """Tensors handed from thread to thread."""

    name = "threads"

    def __init__(self, exchange: "_Exchange", rank: int) -> None:
        self.calls: list[str] = []
        self._exchange = exchange
        self._rank = rank

    def barrier(self) -> None:
        self._swap("barrier", None)

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(torch.stack(self._swap("all_reduce", x.clone())).sum(dim=0))

    def all_gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        for out, gathered in zip(outs, zip(*self._swap("all_gather", xs), strict=True), strict=True):
            torch.stack(gathered, out=out)

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], out: torch.Tensor, receive_counts: list[int]) -> None:
        assert sum(send_counts) == x.shape[0]
        received = [pieces[self._rank] for pieces in self._swap("all_to_all", torch.split(x, send_counts))]
        assert [piece.shape[0] for piece in received] == receive_counts, "sender and receiver disagree"
        torch.cat(received, out=out)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.stack([addends[self._rank] for addends in self._swap("reduce_scatter", x)]).sum(dim=0))

    def _swap(self, call: str, value: T) -> list[T]:
        self.calls.append(call)
        return self._exchange.swap(self._rank, value)


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
