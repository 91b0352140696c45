"""One small message a second for everybody who watches, and the last ten minutes for those who come anew."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from moeserve.server.dashboard.alarms import find_alarms
from moeserve.server.dashboard.picture import Picture, Point

INTERVAL_S: Final = 1.0
HISTORY_POINTS: Final = 600
_encode = msgspec.json.Encoder().encode


class LiveFeed:
    """Takes a picture a second in one task (`run`); listeners get the newest one, however slow they read."""

    def __init__(self, take_picture: Callable[[], Picture]) -> None:
        self._take_picture = take_picture
        self._history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._newest: Picture | None = None
        self._event = b""
        self._changed = asyncio.Condition()
        self._num_listeners = 0
        self._number = 0
        self._is_closed = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(INTERVAL_S)

    async def step(self) -> None:
        """Take a picture now and tell the listeners."""
        picture = self._take_picture()
        self._newest = picture
        self._history.append(picture.point)
        self._number += 1
        if self._num_listeners:
            self._event = self._encoded(picture)
            async with self._changed:
                self._changed.notify_all()

    async def close(self) -> None:
        """End all streams: the server stops."""
        self._is_closed = True
        async with self._changed:
            self._changed.notify_all()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; the first one has the history."""
        self._num_listeners += 1
        try:
            seen = self._number
            if self._newest is not None:
                yield self._encoded(self._newest, history=list(self._history))
            while await self._is_newer(than=seen):
                seen = self._number
                yield self._event
        finally:
            self._num_listeners -= 1

    async def _is_newer(self, *, than: int) -> bool:
        """Wait for the next picture; False when there will be none."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._number != than or self._is_closed)
        return not self._is_closed

    def _encoded(self, picture: Picture, **more: Any) -> bytes:
        content = msgspec.to_builtins(picture) | {"alarms": msgspec.to_builtins(find_alarms(picture))} | more
        return b"id: %d\ndata: %s\n\n" % (self._number, _encode(content))
