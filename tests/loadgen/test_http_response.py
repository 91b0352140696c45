"""The response parser against h11, however the bytes are cut; and what is no response."""

import itertools

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.loadgen.http_response import BadResponseError, ResponseParser

BODIES = st.lists(st.binary(max_size=40), max_size=5)


def _by_h11(data: bytes) -> tuple[int, dict[str, str], bytes]:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Connection", "close")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    status, headers, body = 0, {}, b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
    return status, headers, body


def _by_us(data: bytes, cuts: list[int]) -> tuple[int, dict[str, str], bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    parser = ResponseParser()
    body = b"".join(parser.feed(data[start:end]) for start, end in itertools.pairwise(edges) if start < end)
    parser.end()
    assert parser.is_complete
    return parser.status, parser.headers, body


@given(bodies=BODIES, framing=st.sampled_from(["chunked", "trailers", "length", "close", "none"]),
       announced=st.booleans(), cuts=st.lists(st.integers(0, 10_000), max_size=12))  # fmt: skip
def test_it_reads_what_h11_reads(bodies: list[bytes], framing: str, announced: bool, cuts: list[int]) -> None:
    head, body = b"HTTP/1.1 200 OK\r\nX-Request-Id: r-1\r\n", b"".join(bodies)
    if framing in ("chunked", "trailers"):
        trailers = b"X-Late: 1\r\nX-Later: 2\r\n" if framing == "trailers" else b""
        chunks = b"".join(b"%X;ext=1\r\n%s\r\n" % (len(each), each) for each in bodies if each)
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"
    elif framing == "length":
        data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif framing == "close":
        data = head + b"\r\n" + body
    else:
        data = head.replace(b"200 OK", b"204 No Content") + b"\r\n"
    if announced:
        data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + data
    assert _by_us(data, cuts) == _by_h11(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP"),
        (b"HTTP/1.1 OK\r\n\r\n", "not an HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "hexadecimal"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n", "hexadecimal"),
        (b"", "before the end"),
        (b"HTTP/1.1 200 OK\r\nConte", "before the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", "before the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "before the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", "before the end"),
    ],
)
def test_what_is_no_whole_response_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadResponseError, match=reason):
        _by_us(data, [])
