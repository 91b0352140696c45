"""Answers that end when the client goes away: whole ones, and streams of server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.server.errors import describe_failure
from moeserve.server.generation import Generation
from moeserve.server.sequence import SequenceDelta

_T = TypeVar("_T")
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class EventRenderer(Protocol):
    """An endpoint's own events. Each method returns events that are ready to send."""

    def opening(self) -> bytes: ...

    def events(self, delta: SequenceDelta) -> bytes: ...

    def usage_event(self) -> bytes: ...


class JsonResponse(Response):
    """A struct or plain values, encoded."""

    media_type = "application/json"

    def __init__(self, content: msgspec.Struct | Mapping[str, Any], status_code: int = 200) -> None:
        super().__init__(_encode(content), status_code)


class GenerationStream(Response):
    """Sends a generation as events, and closes it at the end, whatever the end is."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, renderer: EventRenderer, *, include_usage: bool) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._renderer = renderer
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            try:
                await until_client_gone(receive, self._send_all(send))
            except (ClientGoneError, OSError):
                return

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events = self._events()
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The status is sent already: what goes wrong from here on is the last event."""
        try:
            yield self._renderer.opening()
            async for deltas in self._generation.deltas():
                yield b"".join([self._renderer.events(delta) for delta in deltas])
            if self._include_usage:
                yield self._renderer.usage_event()
            yield _DONE
        except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it, and the log
            yield b"data: " + describe_failure(error) + b"\n\n"


def encode_event(chunk: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(chunk) + b"\n\n"


async def until_client_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`; ClientGoneError, with `work` cancelled, when the client goes first.

    The request's body must have been read: from then on `receive` has only this one thing to say.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
