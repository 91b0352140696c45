"""Groups of real processes: the same results whatever carries the tensors, and the carrier that the hosts allow."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from moeserve.parallel import Group, ParallelContext, ParallelLayout, init_parallel
from moeserve.parallel import init as parallel_init
from moeserve.testing.multiprocess import run_ranks
from moeserve_kernels import native, shm_collectives

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.float16]


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype, in whichever order they are taken."""
    generator = torch.Generator().manual_seed(1000 * sum(shape) + rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def check_collectives(group: Group) -> None:
    size, rank = group.size, group.rank
    for num_rows, dtype in zip([0, 1, 7, 40_000], DTYPES, strict=True):
        shape = (num_rows, 3)
        inputs = [of_rank(member, shape, dtype) for member in range(size)]
        total = torch.stack(inputs).sum(dim=0).to(dtype)
        assert torch.equal(group.all_reduce(inputs[rank].clone()), total)
        assert torch.equal(group.all_gather(inputs[rank]), torch.stack(inputs))
        bytes_of = [x.to(torch.uint8) for x in inputs]
        gathered, gathered_bytes = group.all_gather_each((inputs[rank], bytes_of[rank]))
        assert torch.equal(gathered, torch.stack(inputs))
        assert torch.equal(gathered_bytes, torch.stack(bytes_of))

        addends = [of_rank(member, (size, *shape), dtype) for member in range(size)]
        mine = torch.stack(addends).sum(dim=0).to(dtype)[rank]
        assert torch.equal(group.reduce_scatter(addends[rank]), mine)

        # Nothing to oneself, more to higher ranks, and from the last member nothing at all.
        counts = [[num_rows * abs(i - j) * (i < size - 1) for j in range(size)] for i in range(size)]
        sent = [of_rank(member, (sum(row), 3), dtype) for member, row in enumerate(counts)]
        received = group.all_to_all(sent[rank], counts[rank], [row[rank] for row in counts])
        assert torch.equal(received, torch.cat([x.split(row)[rank] for x, row in zip(sent, counts, strict=True)]))
        group.barrier()


def check_groups(parallel: ParallelContext) -> list[str | None]:
    """What carries each group; all of them are tried."""
    groups = [parallel.tp, parallel.dp, parallel.ep]
    for group in groups:
        check_collectives(group)
    return [group.transport_name for group in groups]


@contextmanager
def logged_messages() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moeserve.parallel")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def in_each_circumstance(rank: int) -> tuple[dict[str, list[str | None]], list[str]]:
    """What carries tp, dp and ep in each circumstance, and what the rank logged in the first."""
    native.load()
    layout = ParallelLayout(tp_size=2, dp_size=2, rank=rank)
    carriers: dict[str, list[str | None]] = {}
    with logged_messages() as said:
        carriers["one host"] = check_groups(init_parallel(layout, CPU))

    def with_hosts(circumstance: str, host: Callable[[], str | None]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel_init, "host_of_this_process", host)
            carriers[circumstance] = check_groups(init_parallel(layout, CPU))

    with_hosts("two hosts", lambda: f"host of replica {layout.dp_rank}")
    with_hosts("one rank without native kernels", lambda: None if rank == 3 else "host")

    def refuse(path: str, *, rank: int, size: int) -> None:
        raise PermissionError(path)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shm_collectives, "join_segment", refuse)
        carriers["memory that one rank cannot open"] = check_groups(init_parallel(layout, CPU))
    return carriers, said


def test_every_carrier_gives_the_same_and_is_taken_where_it_can() -> None:
    """Ranks 0 and 1 are replica 0. Columns: tp, dp, ep."""
    try:
        native.build()
    except native.NativeUnavailable as reason:
        pytest.skip(str(reason))
    shared, gloo = "shared memory", "gloo"
    for rank, (carriers, said) in enumerate(run_ranks(in_each_circumstance, 4, timeout_s=200.0)):
        line = "collectives: tp by shared memory, dp by shared memory, ep by shared memory"
        assert said == ([line] if rank == 0 else [])
        assert carriers == {
            "one host": [shared, shared, shared],
            "two hosts": [shared, gloo, gloo],
            "one rank without native kernels": [shared if rank < 2 else gloo, gloo if rank in (1, 3) else shared, gloo],
            "memory that one rank cannot open": [
                gloo if rank < 2 else shared,
                gloo if rank in (1, 3) else shared,
                gloo,
            ],
        }
