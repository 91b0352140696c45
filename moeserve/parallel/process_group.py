"""torch.distributed as a transport: NCCL between GPUs, gloo between CPUs of several hosts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moeserve_kernels.shm_collectives import PeerLostError

_SIGNS_OF_A_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Raise PeerLostError for what torch.distributed says when a process is gone: it has no exception type for it."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
            raise PeerLostError(str(error)) from error
        raise


class ProcessGroupTransport:
    """Collectives of a torch.distributed process group."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self.name = dist.get_backend(process_group)

    @naming_lost_peers()
    def barrier(self) -> None:
        dist.barrier(self._group)

    @naming_lost_peers()
    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self._group)

    @naming_lost_peers()
    def all_gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        # In lists: the form with one tensor has another name in every other release of torch.
        works = [
            dist.all_gather(list(out.unbind()), x, group=self._group, async_op=True)
            for x, out in zip(xs, outs, strict=True)
        ]
        for work in works:
            work.wait()

    @naming_lost_peers()
    def all_to_all(self, x: torch.Tensor, send_counts: list[int], out: torch.Tensor, receive_counts: list[int]) -> None:
        dist.all_to_all_single(out, x, receive_counts, send_counts, group=self._group)

    @naming_lost_peers()
    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        dist.reduce_scatter(out, list(x.unbind()), group=self._group)
