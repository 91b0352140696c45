"""Text completions: a generation as one answer, or as the events of a stream; both can begin with the prompt."""

from collections.abc import Sequence

from moeserve.engine.outputs import TokenLogprobs
from moeserve.server.generation import Generation
from moeserve.server.logprobs import CompletionLogprobsWriter
from moeserve.server.rendering import AnswerHead, WholeOutput
from moeserve.server.responses import Completion, CompletionChoice, CompletionLogprobs
from moeserve.server.sequence import SequenceDelta
from moeserve.server.streaming import encode_event
from moeserve.tokenizer import Tokenizer


class CompletionRenderer:
    def __init__(
        self,
        head: AnswerHead,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        echoes: Sequence[str] | None,
        has_logprobs: bool,
        skip_special_tokens: bool,
    ) -> None:
        """`echoes`: the text that each choice begins with; None without `echo`."""
        self._head = head
        self._generation = generation
        self._echoes = dict(enumerate(echoes or ()))
        """Of the choices that have not begun yet."""
        self._writers = [
            CompletionLogprobsWriter(tokenizer, skip_special_tokens=skip_special_tokens)
            for _ in (generation.sequences if has_logprobs else ())
        ]

    def whole(self, outputs: Sequence[WholeOutput]) -> Completion:
        choices = []
        for output in outputs:
            text, logprobs = self._begin(output.index, output.text, output.logprobs)
            choices.append(
                CompletionChoice(
                    index=output.index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
            )
        head, usage = self._head, self._generation.usage()
        return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)

    def opening(self) -> bytes:
        """A completion has no role to tell."""
        return b""

    def events(self, delta: SequenceDelta) -> bytes:
        """Text with its log-probabilities; then, at the end, the reason alone."""
        events = b""
        if delta.text or delta.logprobs or delta.index in self._echoes:
            text, logprobs = self._begin(delta.index, delta.text, delta.logprobs)
            events = self._event(CompletionChoice(index=delta.index, text=text, logprobs=logprobs))
        if delta.finish_reason is not None:
            events += self._event(
                CompletionChoice(
                    index=delta.index,
                    text="",
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return events

    def usage_event(self) -> bytes:
        head, usage = self._head, self._generation.usage()
        return encode_event(Completion(id=head.id, created=head.created, model=head.model, choices=[], usage=usage))

    def _event(self, choice: CompletionChoice) -> bytes:
        head, usage = self._head, self._head.usage_in_event(self._generation, choice.index)
        return encode_event(
            Completion(id=head.id, created=head.created, model=head.model, choices=[choice], usage=usage)
        )

    def _begin(self, index: int, text: str, entries: Sequence[TokenLogprobs]) -> tuple[str, CompletionLogprobs | None]:
        """Text and log-probabilities with the prompt's before them, if they are the choice's first and it echoes."""
        echo = self._echoes.pop(index, None)
        if not self._writers:
            return (echo or "") + text, None
        if echo is None:
            return text, self._writers[index].write(entries)
        sequence = self._generation.sequences[index]
        scored = sequence.prompt_logprobs
        unscored = sequence.prompt_token_ids[: len(sequence.prompt_token_ids) - len(scored)]
        return echo + text, self._writers[index].write([*scored, *entries], unscored_token_ids=unscored)
