"""What whole answers and streams share: who they are, when usage is told, and outputs put together."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from msgspec import UNSET, UnsetType

from moeserve.engine.outputs import FinishReason, TokenLogprobs
from moeserve.server.generation import Generation
from moeserve.server.responses import Usage
from moeserve.server.schemas import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The first fields of every answer, and of every event of a stream."""

    id: str
    model: str
    created: int
    include_usage: bool
    continuous_usage: bool

    @classmethod
    def create(cls, prefix: str, model: str, request: GenerationRequest) -> Self:
        options = request.stream_options
        return cls(
            id=f"{prefix}-{uuid.uuid4().hex}",
            model=model,
            created=int(time.time()),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )

    def usage_in_event(self, generation: Generation, index: int) -> Usage | UnsetType | None:
        """The `usage` field of an event that is not the last."""
        if self.continuous_usage:
            return generation.usage_of(index)
        return None if self.include_usage else UNSET


@dataclass(slots=True, kw_only=True)
class WholeOutput:
    """One sequence from its first delta to its last."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def collect(generation: Generation) -> Sequence[WholeOutput]:
    """Wait for the end of every sequence. Raises EngineError when the engine gives up."""
    outputs = [WholeOutput(index=sequence.index) for sequence in generation.sequences]
    async for deltas in generation.deltas():
        for delta in deltas:
            output = outputs[delta.index]
            output.texts.append(delta.text)
            output.logprobs += delta.logprobs
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
    return outputs
