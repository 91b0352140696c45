"""The gathering selector on real sockets, with a rest in which a test decides what comes."""

import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from moeserve.loadgen.event_loop import GatheringSelector, run

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    with ExitStack() as stack:
        yield [
            (stack.enter_context(ours), stack.enter_context(theirs))
            for ours, theirs in (socket.socketpair() for _ in range(9))
        ]


def test_what_comes_during_the_rest_is_given_with_what_woke(pairs: list[Pair]) -> None:
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        pairs[5][1].send(b"x")

    with GatheringSelector(rest) as selector:
        for ours, _ in pairs:
            selector.register(ours, selectors.EVENT_READ)
        pairs[2][1].send(b"x")
        ready = selector.select(20.0)
    assert {key.fileobj for key, _ in ready} == {pairs[2][0], pairs[5][0]}
    assert 0 < rests[0] < 0.001


def test_few_streams_and_mere_looks_have_no_rest(pairs: list[Pair]) -> None:
    def rest(seconds: float) -> None:
        raise AssertionError("it must not rest")

    with GatheringSelector(rest) as selector:
        for ours, _ in pairs[:7]:
            selector.register(ours, selectors.EVENT_READ)
        pairs[2][1].send(b"x")
        assert [key.fileobj for key, _ in selector.select(20.0)] == [pairs[2][0]]
        for ours, _ in pairs[7:]:
            selector.register(ours, selectors.EVENT_READ)
        assert [key.fileobj for key, _ in selector.select(0)] == [pairs[2][0]]
        pairs[2][0].recv(1)
        assert selector.select(0) == []


def test_it_runs_a_coroutine_to_its_end() -> None:
    async def main() -> int:
        return 7

    assert run(main()) == 7
