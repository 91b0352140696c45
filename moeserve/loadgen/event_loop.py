"""The event loop of the load generator: with many streams open it wakes once for several tokens.

A server writes the tokens of a step one stream after the other, and a client that is quick wakes for each of them. To
fall asleep and wake costs more than to read a token, and it is taken from the server where both share a processor. So
with many streams open a wake is followed by a short rest, and then by all that has come meanwhile. The rest is what
reading one token of each stream takes, up to a third of a millisecond: no token is seen later than it would be if all
had come together.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Ready: TypeAlias = list[tuple[selectors.SelectorKey, int]]

_MIN_STREAMS = 8
"""With fewer open, a rest would be shorter than timers are exact."""
_REST_A_STREAM_S = 10e-6
_MAX_REST_S = 320e-6


class GatheringSelector(selectors.DefaultSelector):
    """Waits as its base class does, then rests and looks again; a mere look, with a timeout of 0, has no rest."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self._sleep = sleep

    def select(self, timeout: float | None = None) -> Ready:
        ready = super().select(timeout)
        num_open = len(self.get_map())
        if not ready or timeout == 0 or num_open < _MIN_STREAMS:
            return ready
        self._sleep(min(num_open * _REST_A_STREAM_S, _MAX_REST_S))
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on such an event loop."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(GatheringSelector())) as runner:
        return runner.run(main)
