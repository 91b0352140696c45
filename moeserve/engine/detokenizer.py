"""Token ids of one request to text, as soon as the text is certain.

Two things are not certain yet: a character whose bytes are not all there (the tokenizer decodes it to U+FFFD at the end
of the text), and text that may turn out to be the beginning of a stop string. Both are held back until later tokens, or
`finish()`, settle them.

Decoders are not a plain concatenation (SentencePiece drops the first space of a text), so tokens are decoded together
with the few tokens before them, whose text is then cut off. A token costs the decoding of this small window, never of
the whole output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeserve.engine.stop_matcher import StopMatcher

_REPLACEMENT = "\ufffd"
_NUM_PROMPT_CONTEXT = 8
_MAX_OPEN_TOKENS = 16
"""No character needs so many tokens: beyond it, part of them is settled (endless invalid bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizedText:
    text: str
    """What has become certain."""
    stop_reason: str | None
    """The stop string that ended the request; `text` ends before it, or with it if that was asked for."""
    num_tokens: int
    """How many of the given tokens were used: all, or those up to the end of the stop string."""


class Detokenizer:
    """The text of one request. `decode` turns token ids into text, any number at once.

    Of several stop strings the one whose end comes first wins, and among those with the same end the longest: the only
    rule that does not depend on how the text is cut into tokens. The first `min_tokens` - 1 tokens are not searched.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        *,
        min_tokens: int = 0,
    ) -> None:
        self._decode = decode
        self._context = list(prompt_token_ids[-_NUM_PROMPT_CONTEXT:])
        self._num_context_chars = len(decode(self._context))
        self._open: list[int] = []
        """Tokens behind the context; the text of at least the last one is not certain."""
        self._num_open_chars_taken = 0
        self._stops = StopMatcher(stop)
        self._held = ""
        """Certain text that may begin a stop string."""
        self._include_stop = include_stop_str_in_output
        self._num_unsearched_tokens = max(min_tokens - 1, 0)
        self._is_stopped = False

    def append(self, token_ids: Sequence[int]) -> DetokenizedText:
        """Take the next output tokens. Not to be called after a stop."""
        assert not self._is_stopped
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            text = self._take_token(token_id)
            if self._num_unsearched_tokens > 0:
                self._num_unsearched_tokens -= 1
                pieces.append(text)
                continue
            certain, stop = self._search(text)
            pieces.append(certain)
            if stop is not None:
                self._is_stopped = True
                return DetokenizedText(text="".join(pieces), stop_reason=stop, num_tokens=index + 1)
        return DetokenizedText(text="".join(pieces), stop_reason=None, num_tokens=len(token_ids))

    def finish(self) -> str:
        """The rest, when no more tokens come; empty after a stop."""
        if self._is_stopped:
            return ""
        self._is_stopped = True
        rest = self._text_behind(self._context, self._open)[self._num_open_chars_taken :]
        certain, stop = self._search(rest)
        return certain if stop is not None else certain + self._held

    def _take_token(self, token_id: int) -> str:
        """Text that this token has completed."""
        self._open.append(token_id)
        text = self._open_text()
        certain = text.rstrip(_REPLACEMENT)
        completed = certain[self._num_open_chars_taken :]
        self._num_open_chars_taken += len(completed)
        if certain and len(certain) == len(text):
            self._make_context(self._open)
            self._open = []
            self._num_open_chars_taken = 0
        elif len(self._open) > _MAX_OPEN_TOKENS:
            completed += self._settle(text)
        return completed

    def _settle(self, text: str) -> str:
        """Close the longest head of the open tokens that no later token can change.

        A cut is safe where both sides decode to the same text apart as together: a character that goes on behind the
        cut would come out as two replacements, not as one.
        """
        for cut in range(len(self._open) - 1, 0, -1):
            head_ids, tail_ids = self._open[:cut], self._open[cut:]
            head = self._text_behind(self._context, head_ids)
            tail = self._text_behind(head_ids if head else self._context, tail_ids)
            if head + tail == text and (tail or not head):
                completed = head[self._num_open_chars_taken :]
                self._num_open_chars_taken = max(self._num_open_chars_taken - len(head), 0)
                self._open = tail_ids
                if head:
                    self._make_context(head_ids)
                return completed
        return ""

    def _make_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._num_context_chars = len(self._decode(token_ids))

    def _open_text(self) -> str:
        return self._decode(self._context + self._open)[self._num_context_chars :]

    def _text_behind(self, context: list[int], token_ids: list[int]) -> str:
        return self._decode(context + token_ids)[len(self._decode(context)) :]

    def _search(self, text: str) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string if one is complete."""
        found = self._stops.advance(text)
        if found is not None:
            end, stop = found
            whole = self._held + text[:end]
            return (whole if self._include_stop else whole[: len(whole) - len(stop)]), stop
        whole = self._held + text
        cut = len(whole) - self._stops.num_matched_chars
        self._held = whole[cut:]
        return whole[:cut], None
