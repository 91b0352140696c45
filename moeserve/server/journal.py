"""The frontend's record of unfinished requests: enough to go on with them when the ranks were started again."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import RequestOutput
from moeserve.ids import DpRank, RequestId


class OutputSink(Protocol):
    """Where the news of a request go; must return at once."""

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True, kw_only=True)
class JournalEntry:
    """One sequence in the engine."""

    request: AddRequest
    """As it was sent first, with the seed that was drawn for it."""
    sink: OutputSink
    dp_rank: DpRank
    incarnation: str
    """The life of the replica that knows this request."""
    work_tokens: int
    """Its share of the replica's outstanding tokens."""
    submitted_s: float
    last_token_s: float | None = None
    output_token_ids: list[int] = field(default_factory=list)

    def continuation(self) -> AddRequest:
        """The request to send again: it goes on behind the output that the client has already."""
        if not self.output_token_ids:
            return self.request
        params = dataclasses.replace(self.request.sampling_params, prompt_logprobs=None)  # came with the first output
        return msgspec.structs.replace(
            self.request, sampling_params=params, output_token_ids=list(self.output_token_ids)
        )


class Journal:
    """The unfinished requests by id, in the order they came."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(list(self._entries.values()))

    def add(self, entry: JournalEntry) -> None:
        assert entry.request.request_id not in self._entries
        self._entries[entry.request.request_id] = entry

    def get(self, request_id: RequestId) -> JournalEntry | None:
        return self._entries.get(request_id)

    def remove(self, request_id: RequestId) -> JournalEntry | None:
        """The entry that was there, if any."""
        return self._entries.pop(request_id, None)
