"""One HTTP/1.1 response without I/O: bytes as they come in, the bytes of its body out."""


class BadResponseError(RuntimeError):
    """What came is not an HTTP/1.1 response, or it was cut short."""


class ResponseParser:
    """Reads one response. A chunk of a chunked body is given out when all of it is here."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is read."""
        self.headers: dict[str, str] = {}
        """Names in lower case."""
        self.is_complete = False
        self._rest = b""
        self._is_chunked = False
        self._left: int | None = None
        """Bytes of the body that are still to come; None where the end of the connection ends it."""

    def feed(self, data: bytes) -> bytes:
        """The next bytes of the body, maybe none. Raises BadResponseError."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not self.status:
            data = self._read_head(data)
            if not self.status:
                self._rest = data
                return b""
        if self.is_complete:
            return b""
        return self._read_chunks(data) if self._is_chunked else self._read_plain(data)

    def end(self) -> None:
        """The connection ended. Raises BadResponseError where the response did not."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_complete = True
        if not self.is_complete:
            raise BadResponseError("the server closed the connection before the end of its answer")

    def _read_head(self, data: bytes) -> bytes:
        """What follows the head; all of it, with the status still 0, where the head is not whole."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return data
            first, *lines = data[:end].decode("latin-1").split("\r\n")
            data = data[end + 4 :]
            version, _, rest = first.partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
                raise BadResponseError(f"not an HTTP/1.1 response: {first[:80]!r}")
            status = int(rest[:3])
            if status >= 200:  # lower ones only announce the response
                break
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.status = status
        self._read_framing()
        return data

    def _read_framing(self) -> None:
        """How the body ends: RFC 9112, section 6.3."""
        length = self.headers.get("content-length", "")
        if self.status in (204, 304):
            self._left = 0
        elif self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._is_chunked = True
        elif length:
            if not length.isdigit():
                raise BadResponseError(f"Content-Length must be a whole number, got {length!r}")
            self._left = int(length)
        self.is_complete = self._left == 0

    def _read_plain(self, data: bytes) -> bytes:
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.is_complete = self._left == 0
        return body

    def _read_chunks(self, data: bytes) -> bytes:
        pieces = []
        start = 0
        while True:
            line_end = data.find(b"\r\n", start)
            if line_end < 0:
                break
            size = _chunk_size(data[start:line_end])
            if size == 0:
                self.is_complete = data.find(b"\r\n\r\n", line_end) >= 0  # with trailers or without
                break
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            pieces.append(data[line_end + 2 : end])
            start = end + 2
        self._rest = data[start:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        size = int(digits, 16)
    except ValueError:
        size = -1
    if size < 0:
        raise BadResponseError(f"a chunk must begin with its size in hexadecimal, got {line[:40]!r}")
    return size
