"""Chat completions: a generation as one answer, or as the events of a stream."""

from collections.abc import Sequence

from moeserve.engine.outputs import TokenLogprobs
from moeserve.server.generation import Generation
from moeserve.server.logprobs import chat_logprobs
from moeserve.server.rendering import AnswerHead, WholeOutput
from moeserve.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from moeserve.server.sequence import SequenceDelta
from moeserve.server.streaming import encode_event
from moeserve.tokenizer import Tokenizer


class ChatRenderer:
    def __init__(self, head: AnswerHead, generation: Generation, tokenizer: Tokenizer, *, has_logprobs: bool) -> None:
        self._head = head
        self._generation = generation
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def whole(self, outputs: Sequence[WholeOutput]) -> ChatCompletion:
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[
                ChatChoice(
                    index=output.index,
                    message=ChatMessage(content=output.text),
                    logprobs=self._logprobs(output.logprobs),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
                for output in outputs
            ],
            usage=self._generation.usage(),
        )

    def opening(self) -> bytes:
        """The role of every choice."""
        delta = ChatDelta(role="assistant", content="")
        choices = [ChatChunkChoice(index=sequence.index, delta=delta) for sequence in self._generation.sequences]
        return b"".join([self._event(choice) for choice in choices])

    def events(self, delta: SequenceDelta) -> bytes:
        """Text with its log-probabilities; then, at the end, the reason alone."""
        events = b""
        if delta.text or delta.logprobs:
            text = ChatDelta(content=delta.text)
            events = self._event(
                ChatChunkChoice(index=delta.index, delta=text, logprobs=self._logprobs(delta.logprobs))
            )
        if delta.finish_reason is not None:
            events += self._event(
                ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return events

    def usage_event(self) -> bytes:
        head, usage = self._head, self._generation.usage()
        return encode_event(ChatChunk(id=head.id, created=head.created, model=head.model, choices=[], usage=usage))

    def _event(self, choice: ChatChunkChoice) -> bytes:
        usage = self._head.usage_in_event(self._generation, choice.index)
        return encode_event(
            ChatChunk(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[choice],
                usage=usage,
            )
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, entries) if self._has_logprobs else None
