"""A scripted HTTP server on the event loop of its test, which decides every byte and its moment."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """One request, whole."""

    path: str
    headers: dict[str, str]
    body: Any
    hung_up: asyncio.Event
    """Set when the client has closed its side."""


Respond: TypeAlias = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]
"""Writes the answer; the connection is closed when it returns."""


@asynccontextmanager
async def stream_server(respond: Respond) -> AsyncIterator[str]:
    """The URL of a server that answers every request by `respond`, each in a task of its own."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"null")
        hung_up = asyncio.Event()
        watcher = asyncio.create_task(_watch(reader, hung_up))
        request = ReceivedRequest(path=first.split(" ")[1], headers=headers, body=body, hung_up=hung_up)
        try:
            await respond(request, writer)
            await writer.drain()
        except ConnectionError:
            pass  # the client has hung up
        finally:
            watcher.cancel()
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _watch(reader: asyncio.StreamReader, hung_up: asyncio.Event) -> None:
    with suppress(ConnectionError):
        await reader.read()
    hung_up.set()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; empty data is the end of the body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: object) -> bytes:
    """A server-sent event, as a chunk."""
    return chunk(b"data: " + json.dumps(payload).encode() + b"\n\n")


def tokens_event(request: ReceivedRequest, completion_tokens: int) -> bytes:
    """The event that says so many tokens are there now, for a prompt of token ids or of text."""
    prompt = request.body.get("prompt", "")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": completion_tokens}
    return event({"choices": [{"index": 0, "text": "a"}], "usage": usage})


def answer(request: ReceivedRequest) -> bytes:
    """A whole answer: head, as many tokens as were asked for, and the end."""
    events = b"".join(tokens_event(request, count + 1) for count in range(request.body["max_tokens"]))
    return STREAM_HEAD + events + chunk(b"data: [DONE]\n\n") + chunk(b"")
