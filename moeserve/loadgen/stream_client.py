"""The lean HTTP client of the load generator: POST a body, have every event of the answer called back with its time.

A load generator shares the processor with the server it measures, so what a token costs here is what counts. One event
costs one read, one look for its line ends and one call: no task is woken, and no queue is filled, for a token. Every
request has a connection of its own, because some servers stall on the second request of one that is kept.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast
from urllib.parse import urlsplit

from moeserve.loadgen.events import EventParser
from moeserve.loadgen.http_response import BadResponseError, ResponseParser

OnEvent: TypeAlias = Callable[[bytes, float], None]
"""Takes an event's data and the `time.perf_counter()` at which it came; may raise RuntimeError to end the request."""

_BUFFER_BYTES = 16_384
_MAX_ERROR_BYTES = 65_536
_SHOWN_ERROR_CHARS = 300


class RefusedError(RuntimeError):
    """The server answered with a status that is no success."""

    def __init__(self, status: int, headers: Mapping[str, str], words: str) -> None:
        super().__init__(f"{status}: {words[:_SHOWN_ERROR_CHARS]}")
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go."""

    host: str
    port: int
    is_tls: bool
    base_path: str
    """Before the path of every request; empty or begins with a slash."""

    @classmethod
    def from_url(cls, url: str) -> "Server":
        """Of a URL with or without `/v1` at its end. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a server's URL must be http://HOST or https://HOST, got {url!r}")
        is_tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            is_tls=is_tls,
            base_path=parts.path.rstrip("/").removesuffix("/v1"),
        )


class StreamClient:
    """Sends requests to one server; any number at once."""

    def __init__(self, server: Server, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        """timeout_s: for a request from its connection to the end of its answer. headers: sent with each.

        Raises ValueError for a header that cannot be sent.
        """
        _check_headers(headers or {})
        self._server = server
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._tls = ssl.create_default_context() if server.is_tls else None

    async def stream(
        self, path: str, body: bytes, on_event: OnEvent, *, headers: Mapping[str, str] | None = None
    ) -> Mapping[str, str]:
        """Call `on_event` with each event until the answer ends; returns the answer's headers.

        Raises RefusedError, BadResponseError, what `on_event` raised, TimeoutError, or OSError where no connection is.
        """
        request = self._request(path, body, headers or {})
        loop = asyncio.get_running_loop()
        exchange = _Exchange(request, on_event, loop.create_future())
        server = self._server
        try:
            async with asyncio.timeout(self._timeout_s):
                await loop.create_connection(lambda: exchange, server.host, server.port, ssl=self._tls)
                await exchange.done
        except TimeoutError as error:
            if str(error):
                raise
            raise TimeoutError(f"no end of the answer within {self._timeout_s:g} s") from error
        finally:
            exchange.close()
        return exchange.response.headers

    def _request(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        server = self._server
        host = f"[{server.host}]" if ":" in server.host else server.host
        all_headers = {
            "Host": f"{host}:{server.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        _check_headers(headers)
        all_headers |= {**self._headers, **headers}
        lines = [
            f"POST {server.base_path}{path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in all_headers.items()),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body


def _check_headers(headers: Mapping[str, str]) -> None:
    """A value may be a secret: the error names its header only."""
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"the header {name} must be printable ASCII on one line")


class _Exchange(asyncio.BufferedProtocol):
    """One request and its answer on a connection of their own.

    It reads into a buffer of its own: asyncio would allocate 256 KiB for every token otherwise.
    """

    def __init__(self, request: bytes, on_event: OnEvent, done: "asyncio.Future[None]") -> None:
        self.response = ResponseParser()
        self.done = done
        self._request = request
        self._on_event = on_event
        self._events = EventParser()
        self._refusal = b""
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # other event loops have classes of their own
        self._transport.write(self._request)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now_s = time.perf_counter()
        if self.done.done():
            return
        try:
            body = self.response.feed(bytes(self._buffer[:nbytes]))
            if self.response.status >= 300:
                self._refusal = (self._refusal + body)[:_MAX_ERROR_BYTES]
            else:
                for event in self._events.feed(body):
                    self._on_event(event, now_s)
            if self.response.is_complete:
                self._finish()
        except RuntimeError as error:
            self.done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        try:
            if exc is not None:
                raise BadResponseError(f"the connection broke: {exc}") from exc
            self.response.end()
            self._finish()
        except BadResponseError as error:
            self.done.set_exception(error)

    def close(self) -> None:
        """Hang up, at whatever state the exchange is."""
        if self._transport is not None:
            self._transport.abort()
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # seen, where a time-out came first
        self.done.cancel()

    def _finish(self) -> None:
        response = self.response
        if response.status >= 300:
            self.done.set_exception(
                RefusedError(response.status, response.headers, self._refusal.decode(errors="replace"))
            )
        else:
            self.done.set_result(None)
