"""When the tokens of one streamed answer came, from the counts that its chunks carry."""

import msgspec


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What a server says it did."""

    completion_tokens: int
    prompt_tokens: int | None = None


class _Delta(msgspec.Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True, gc=False):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta is not None and (delta.content or delta.reasoning_content)))


class _Timings(msgspec.Struct, frozen=True, gc=False):
    predicted_n: int


class _Chunk(msgspec.Struct, frozen=True, gc=False):
    """The fields that tell tokens; all others are skipped unread."""

    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    timings: _Timings | None = None
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode = msgspec.json.Decoder(_Chunk).decode


class TokenClock:
    """Times of the tokens of one stream.

    A chunk may bring no token (a withheld part of a character) or several. Counts come as `usage` in each chunk, or
    as llama.cpp's `timings`; a server that gives neither in a chunk with text is taken to have sent one token.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._usage: Usage | None = None

    @property
    def times(self) -> tuple[float, ...]:
        """Of the tokens so far."""
        return tuple(self._times)

    @property
    def usage(self) -> Usage | None:
        """The newest that the server gave."""
        return self._usage

    def read(self, text: str | bytes, now_s: float) -> None:
        """One chunk, as JSON. Raises RuntimeError when it is an error or not what the API promises."""
        try:
            chunk = _decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            shown = text if isinstance(text, str) else text.decode(errors="replace")
            raise RuntimeError(f"not a chunk of a completion: {shown[:300]}") from error
        if chunk.error is not msgspec.UNSET:
            raise RuntimeError(f"the server answered with an error: {bytes(chunk.error).decode()[:300]}")
        missing = self._tokens_seen(chunk) - len(self._times)
        if missing == 1:
            self._times.append(now_s)
        elif missing > 1:
            self._times += [now_s] * missing

    def _tokens_seen(self, chunk: _Chunk) -> int:
        if chunk.usage is not None:
            self._usage = chunk.usage
            return chunk.usage.completion_tokens
        if chunk.timings is not None:
            return chunk.timings.predicted_n
        return len(self._times) + any(choice.has_text for choice in chunk.choices)

    def finish(self, *, prompt_tokens: int, output_tokens: int) -> tuple[float, ...]:
        """Raises RuntimeError unless the server says that it did exactly the work it was asked for."""
        if self._usage is None:
            raise RuntimeError("the stream ended without a usage")
        did = self._usage.prompt_tokens, self._usage.completion_tokens
        if did != (prompt_tokens, output_tokens) or len(self._times) != output_tokens:
            raise RuntimeError(f"asked for {prompt_tokens} + {output_tokens} tokens, got {did[0]} + {did[1]}")
        return tuple(self._times)
