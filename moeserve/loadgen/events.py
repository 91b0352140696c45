"""Server-sent events without I/O: bytes of a stream in, the data of whole events out."""


class EventParser:
    """Reads one stream. Lines end in LF or CRLF; fields other than `data`, and comments, are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        """Data lines of the event that is not at its end yet."""

    def feed(self, body: bytes) -> list[bytes]:
        """The data of each event that has come to its end."""
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip(b" \r"))
            elif self._data and line in (b"", b"\r"):
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
