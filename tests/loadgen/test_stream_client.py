"""The client against a server that decides every byte: what is sent, how it ends, and that nothing is left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moeserve.loadgen.http_response import BadResponseError
from moeserve.loadgen.stream_client import RefusedError, Server, StreamClient
from moeserve.testing.stream_server import STREAM_HEAD, ReceivedRequest, chunk, event, stream_server


def _stream(
    respond: Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]],
    *,
    on_event: Callable[[bytes, float], None] = lambda data, now_s: None,
    timeout_s: float = 30.0,
    **headers: str,
) -> Any:
    async def main() -> Any:
        async with stream_server(respond) as url:
            client = StreamClient(Server.from_url(f"{url}/v1"), timeout_s=timeout_s, headers={"X-All": "1"})
            return await client.stream("/v1/completions", b'{"a": 1}', on_event, headers=headers)

    return asyncio.run(main())


def test_events_come_as_they_are_sent_and_headers_at_the_end() -> None:
    seen: list[bytes] = []
    arrived = asyncio.Event()
    requests: list[ReceivedRequest] = []

    def on_event(data: bytes, now_s: float) -> None:
        seen.append(data)
        arrived.set()

    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        writer.write(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nX-Request-Id: r-7\r\n\r\n"))
        for n in range(3):
            arrived.clear()
            writer.write(event({"n": n}))
            await arrived.wait()  # the next one is sent when this one is seen
        writer.write(chunk(b""))

    headers = _stream(respond, on_event=on_event, own="2")
    assert seen == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}']
    assert headers["x-request-id"] == "r-7"
    (request,) = requests
    assert (request.path, request.body) == ("/v1/completions", {"a": 1})
    assert (request.headers["x-all"], request.headers["own"]) == ("1", "2")


def test_a_refusal_carries_status_headers_and_words() -> None:
    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        body = b'{"error": "busy"}'
        writer.write(b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with pytest.raises(RefusedError, match=r'429: \{"error": "busy"\}') as caught:
        _stream(respond)
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "3")


def test_an_answer_that_is_cut_short_is_an_error() -> None:
    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + event({"n": 0}))

    with pytest.raises(BadResponseError, match="before the end"):
        _stream(respond)


def test_a_reset_connection_is_an_error() -> None:
    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    with pytest.raises((BadResponseError, OSError)):
        _stream(respond)


def test_an_error_of_the_listener_ends_the_request() -> None:
    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + event({"n": 0}))
        await asyncio.Event().wait()

    def on_event(data: bytes, now_s: float) -> None:
        raise RuntimeError("not what I wanted")

    with pytest.raises(RuntimeError, match="not what I wanted"):
        _stream(respond, on_event=on_event)


def test_a_silent_server_times_out() -> None:
    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        _stream(respond, timeout_s=0.05)


def test_a_cancelled_request_hangs_up() -> None:
    async def main() -> None:
        begun, hung_up = asyncio.Event(), asyncio.Event()

        async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
            writer.write(STREAM_HEAD)
            begun.set()
            await request.hung_up.wait()
            hung_up.set()

        async with stream_server(respond) as url:
            client = StreamClient(Server.from_url(url), timeout_s=30.0)
            task = asyncio.create_task(client.stream("/", b"{}", lambda data, now_s: None))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(hung_up.wait(), 20.0)

    asyncio.run(main())


@pytest.mark.parametrize("value", ["a\r\nX-Admin: 1", "a\nb", "schlüssel"])
def test_a_header_is_one_line_and_a_bad_one_stays_secret(value: str) -> None:
    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("nothing must be sent")

    with pytest.raises(ValueError, match="the header tenant must be") as caught:
        _stream(respond, tenant=value)
    assert value not in str(caught.value)
    with pytest.raises(ValueError, match="the header Authorization must be"):
        StreamClient(Server.from_url("http://host"), timeout_s=1.0, headers={"Authorization": value})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "")),
        ("http://host/v1/", ("host", 80, False, "")),
        ("https://host/openai/v1", ("host", 443, True, "/openai")),
        ("http://[::1]:9", ("::1", 9, False, "")),
    ],
)
def test_urls(url: str, expected: tuple[str, int, bool, str]) -> None:
    server = Server.from_url(url)
    assert (server.host, server.port, server.is_tls, server.base_path) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST"):
        Server.from_url(url)
