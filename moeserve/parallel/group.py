"""Collectives over some of an engine's ranks, whatever carries them."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Transport(Protocol):
    """What moves tensors between the members of one group: two or more, who all call in the same order.

    Tensors are contiguous. Where a member's process ends, the others get PeerLostError within seconds.
    """

    @property
    def name(self) -> str:
        """For people: `shared memory`, `gloo`, ..."""
        ...

    def barrier(self) -> None:
        """Return when every member has come."""
        ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """x = the sum over members."""
        ...

    def all_gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Each of outs, [size, ...], = its x [...] of every member."""
        ...

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], out: torch.Tensor, receive_counts: list[int]) -> None:
        """Rows of x to each member, rows of out from each."""
        ...

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [...] = the sum over members of x[rank] [size, ...]."""
        ...


class Group:
    """Collectives over some of the engine's ranks; with one member every call is the identity.

    All members call in the same order. Results are new tensors unless said otherwise.
    """

    def __init__(self, transport: Transport | None, *, size: int, rank: int) -> None:
        assert (transport is None) == (size == 1)
        self.size = size
        self.rank = rank
        self._transport = transport

    @property
    def transport_name(self) -> str | None:
        """What carries the tensors; None for a rank alone."""
        return self._transport.name if self._transport is not None else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the members, in place."""
        if self._transport is not None and x.numel() > 0:
            self._transport.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] of each member, N equal everywhere, to [size, N, ...] in rank order."""
        return self.all_gather_each((x,))[0]

    def all_gather_each(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`all_gather` of each: for the price of one where the transport can."""
        if self._transport is None:
            return [x.unsqueeze(0) for x in xs]
        outs = [x.new_empty((self.size, *x.shape)) for x in xs]
        if any(x.numel() > 0 for x in xs):
            self._transport.all_gather([x.contiguous() for x in xs], outs)
        return outs

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the members of [size, N, ...], of which each gets its own [N, ...]."""
        if self._transport is None:
            return x.squeeze(0)
        out = x.new_empty(x.shape[1:])
        if x.numel() > 0:
            self._transport.reduce_scatter(x.contiguous(), out)
        return out

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Send `send_counts[i]` rows of [sum(send_counts), ...] to member i; returns [sum(receive_counts), ...].

        Every member takes part, also one without a row.
        """
        if self._transport is None:
            return x
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        self._transport.all_to_all(x.contiguous(), send_counts, out, receive_counts)
        return out

    def barrier(self) -> None:
        """Return when every member has come."""
        if self._transport is not None:
            self._transport.barrier()
