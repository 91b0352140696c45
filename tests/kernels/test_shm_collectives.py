"""Collectives over shared memory: every bit as the oracle says, and an error, soon, where a member is missing."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import native
from moeserve_kernels.shm_collectives import (
    MembersDisagreeError,
    PeerLostError,
    Segment,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    create_segment,
    join_segment,
    reduce_scatter,
)
from moeserve_kernels.shm_collectives.reference import (
    all_reduce_reference,
    all_to_all_reference,
    reduce_scatter_reference,
)

T = TypeVar("T")

SLOT_BYTES = 256 * 1024
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    try:
        native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


@contextmanager
def open_segment(size: int, *, timeout_s: float = 30.0) -> Iterator[str]:
    """The path at which members join."""
    fd = create_segment(size, timeout_s=timeout_s)
    try:
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def run_members(fn: Callable[[Segment], T], size: int, *, timeout_s: float = 30.0) -> list[T]:
    """`fn` of every member, each in a thread: it only works because those that wait leave the interpreter to others."""
    with open_segment(size, timeout_s=timeout_s) as path, ThreadPoolExecutor(size) as pool:
        segments = [join_segment(path, rank=rank, size=size) for rank in range(size)]
        return list(pool.map(fn, segments))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).mul(100.0).to(dtype)
    return torch.randint(-(2**40), 2**40, shape, generator=generator).to(dtype)


lengths = st.one_of(
    st.integers(0, 70),
    # One less than, exactly and one more than a slot of two-byte numbers, a slot of others, and several slots.
    st.sampled_from([SLOT_BYTES // 8, SLOT_BYTES // 4 + 1, SLOT_BYTES // 2 - 1, SLOT_BYTES // 2, SLOT_BYTES // 2 + 1]),
    st.integers(0, 3 * SLOT_BYTES),
)
sizes = st.integers(1, 5)
seeds = st.integers(0, 1000)


@settings(max_examples=40, deadline=None)
@given(size=sizes, length=lengths, dtype=st.sampled_from(DTYPES), seed=seeds)
def test_all_reduce_gives_every_member_the_same_bits(size: int, length: int, dtype: torch.dtype, seed: int) -> None:
    inputs = [random_tensor((length,), dtype, seed + rank) for rank in range(size)]

    def reduce(segment: Segment) -> torch.Tensor:
        x = inputs[segment.rank].clone()
        all_reduce(segment, x)
        return x

    expected = all_reduce_reference(inputs)
    for result in run_members(reduce, size):
        assert torch.equal(result, expected)


@settings(max_examples=40, deadline=None)
@given(
    size=sizes,
    lengths=st.lists(lengths, min_size=1, max_size=3),
    dtype=st.sampled_from([torch.bool, torch.uint8, torch.int32, torch.float64]),
)
def test_all_gather_copies_all_tensors_of_any_dtype(size: int, lengths: list[int], dtype: torch.dtype) -> None:
    dtypes = [dtype, torch.int64, torch.bfloat16]
    inputs = [
        [random_tensor((n // 3, 3), torch.int64, rank).to(kind) for n, kind in zip(lengths, dtypes, strict=False)]
        for rank in range(size)
    ]

    def gather(segment: Segment) -> list[torch.Tensor]:
        outs = [x.new_empty(size, *x.shape) for x in inputs[segment.rank]]
        all_gather(segment, inputs[segment.rank], outs)
        return outs

    expected = [torch.stack(xs) for xs in zip(*inputs, strict=True)]
    for result in run_members(gather, size):
        assert all(torch.equal(out, wanted) for out, wanted in zip(result, expected, strict=True))


@settings(max_examples=25, deadline=None)
@given(size=sizes, length=lengths, dtype=st.sampled_from(DTYPES), seed=seeds)
def test_reduce_scatter_gives_each_member_its_sum(size: int, length: int, dtype: torch.dtype, seed: int) -> None:
    inputs = [random_tensor((size, length), dtype, seed + rank) for rank in range(size)]

    def reduce(segment: Segment) -> torch.Tensor:
        out = torch.empty(length, dtype=dtype)
        reduce_scatter(segment, inputs[segment.rank], out)
        return out

    for result, expected in zip(run_members(reduce, size), reduce_scatter_reference(inputs), strict=True):
        assert torch.equal(result, expected)


@st.composite
def row_counts(draw: st.DrawFn) -> list[list[int]]:
    """Rows of member i for member j: mostly few or none, sometimes more than a slot holds."""
    size = draw(sizes)
    counts = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 2 * SLOT_BYTES // 64))
    return draw(st.lists(st.lists(counts, min_size=size, max_size=size), min_size=size, max_size=size))


@settings(max_examples=40, deadline=None)
@given(counts=row_counts(), width=st.sampled_from([0, 1, 7, 32]), dtype=st.sampled_from(DTYPES))
def test_all_to_all_brings_every_row_to_its_member(counts: list[list[int]], width: int, dtype: torch.dtype) -> None:
    size = len(counts)
    inputs = [random_tensor((sum(row), width), dtype, rank) for rank, row in enumerate(counts)]

    def exchange(segment: Segment) -> torch.Tensor:
        receive_counts = [row[segment.rank] for row in counts]
        out = torch.empty(sum(receive_counts), width, dtype=dtype)
        all_to_all(segment, inputs[segment.rank], counts[segment.rank], out, receive_counts)
        return out

    for result, expected in zip(run_members(exchange, size), all_to_all_reference(inputs, counts), strict=True):
        assert torch.equal(result, expected)


def test_special_floats_survive_rounding() -> None:
    """Sums in float32: 2^-9 is lost on 1.0 in bfloat16, twice 2^-9 is not; infinities and NaN stay what they are."""
    inputs = [
        torch.tensor([1.0, float("inf"), float("nan"), -0.0, 3.3e38], dtype=torch.bfloat16),
        torch.tensor([2**-9, -1.0, 0.0, -0.0, 3.3e38], dtype=torch.bfloat16),
        torch.tensor([2**-9, 5.0, 1.0, -0.0, 0.0], dtype=torch.bfloat16),
    ]

    def reduce(segment: Segment) -> torch.Tensor:
        x = inputs[segment.rank].clone()
        all_reduce(segment, x)
        return x

    expected = torch.tensor([1 + 2**-7, float("inf"), float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)
    expected[0] = torch.tensor(1 + 2**-8).to(torch.bfloat16)
    for result in run_members(reduce, 3):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert result[3].signbit()


def test_a_slot_is_not_overwritten_while_a_slow_member_reads_it() -> None:
    """Members take turns in being late; collectives of all kinds and lengths follow each other without a pause."""
    lengths = [1, 5000, SLOT_BYTES // 4, SLOT_BYTES, 3]

    def run(segment: Segment) -> list[float]:
        sums = []
        for step in range(60):
            if step % segment.size == segment.rank:
                torch.randn(300, 300).exp().sum()  # busy elsewhere
            x = torch.full((lengths[step % len(lengths)],), float(step + segment.rank))
            all_reduce(segment, x)
            out = torch.empty(segment.size, 2)
            all_gather(segment, [torch.full((2,), float(segment.rank + step))], [out])
            barrier(segment)
            sums += [x.min().item(), x.max().item(), out.sum().item()]
        return sums

    one, *others = run_members(run, 3)
    assert one == [value for step in range(60) for value in (3.0 * step + 3, 3.0 * step + 3, 6.0 * step + 6)]
    assert all(other == one for other in others)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([lambda s: all_reduce(s, torch.ones(2)), lambda s: all_reduce(s, torch.ones(3))], id="lengths"),
        pytest.param(
            [lambda s: all_reduce(s, torch.ones(2)), lambda s: all_reduce(s, torch.ones(2).half())], id="dtypes"
        ),
        pytest.param([lambda s: all_reduce(s, torch.ones(2)), barrier], id="collectives"),
        pytest.param(
            [
                lambda s: all_to_all(s, torch.ones(1), [0, 1], torch.ones(2), [0, 2]),
                lambda s: all_to_all(s, torch.ones(1), [1, 0], torch.ones(2), [2, 0]),
            ],
            id="counts",
        ),
    ],
)
def test_members_that_disagree_fail(calls: list[Callable[[Segment], None]]) -> None:
    def run(segment: Segment) -> None:
        with pytest.raises(MembersDisagreeError):
            calls[segment.rank](segment)

    run_members(run, 2, timeout_s=5.0)


def test_a_member_that_is_alive_and_does_not_come_is_waited_for_as_long_as_was_said() -> None:
    with open_segment(2, timeout_s=0.2) as path:
        segment = join_segment(path, rank=0, size=2)
        join_segment(path, rank=1, size=2)
        with pytest.raises(TimeoutError):
            barrier(segment)


BIG = SLOT_BYTES  # of float32: four rounds, so that a member most likely ends between two of them
CALLS: dict[str, Callable[[Segment], None]] = {
    "barrier": barrier,
    "all_reduce": lambda s: all_reduce(s, torch.ones(BIG)),
    "all_gather": lambda s: all_gather(s, [torch.ones(BIG)], [torch.empty(s.size, BIG)]),
    "all_to_all": lambda s: all_to_all(s, torch.ones(3 * BIG), [BIG] * 3, torch.empty(3 * BIG), [BIG] * 3),
    "reduce_scatter": lambda s: reduce_scatter(s, torch.ones(3, BIG), torch.empty(BIG)),
}


def repeat(call: Callable[[Segment], None], segment: Segment, num_calls: int) -> None:
    for _ in range(num_calls):
        call(segment)


@contextmanager
def other_member(path: str, rank: int, size: int, call: Callable[[Segment], None], num_calls: int) -> Iterator[int]:
    """The id of a process that takes part in so many collectives and then waits; killed at the end, if not before."""
    joined, says_joined = os.pipe()
    pid = os.fork()  # a moment, where a new interpreter takes seconds
    if pid == 0:
        try:
            segment = join_segment(path, rank=rank, size=size)
            os.write(says_joined, b"!")
            repeat(call, segment, num_calls)
            signal.pause()
        finally:
            os._exit(1)
    os.close(says_joined)
    try:
        assert os.read(joined, 1) == b"!"
        yield pid
    finally:
        os.close(joined)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("name", CALLS)
def test_a_member_that_is_killed_ends_the_wait_of_all_others(name: str) -> None:
    """Its parent does not even reap it: a zombie is as dead. The third member fails in a process of its own."""
    call = CALLS[name]
    with (
        open_segment(3, timeout_s=600.0) as path,
        other_member(path, 1, 3, call, 10**9) as killed,
        other_member(path, 2, 3, call, 10**9) as survivor,
    ):
        segment = join_segment(path, rank=0, size=3)
        call(segment)
        killer = threading.Timer(0.1, os.kill, (killed, signal.SIGKILL))
        killer.start()
        with pytest.raises(PeerLostError, match="member 1"):
            repeat(call, segment, 10**9)
        killer.join()
        os.waitid(os.P_PID, survivor, os.WEXITED | os.WNOWAIT)  # returns: it does not wait for ever either


def test_a_member_that_leaves_is_missed_from_the_next_collective_on() -> None:
    with open_segment(2, timeout_s=600.0) as path:
        segment = join_segment(path, rank=0, size=2)
        with other_member(path, 1, 2, lambda s: all_reduce(s, torch.ones(3)), 1):
            x = torch.ones(3)
            all_reduce(segment, x)
            assert x.tolist() == [2.0] * 3
        with pytest.raises(PeerLostError, match="member 1"):
            barrier(segment)


def test_nothing_is_left_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    run_members(barrier, 2)
    assert set(Path("/dev/shm").iterdir()) <= before
