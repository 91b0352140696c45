"""Server-sent events, however the bytes of the stream are cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moeserve.loadgen.events import EventParser

STREAM = (
    b': a comment\n\ndata: {"a": 1}\n\ndata:{"b": 2}\r\n\r\nevent: x\nid: 7\ndata: two\ndata: lines\n\n'
    b"\n\ndata: [DONE]\n\ndata: never ended"
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"two\nlines", b"[DONE]"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_are_the_same_wherever_reads_end(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    events = [event for start, end in itertools.pairwise(edges) for event in parser.feed(STREAM[start:end])]
    assert events == EVENTS


def test_an_event_is_given_out_with_the_byte_that_ends_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [b"x"]
