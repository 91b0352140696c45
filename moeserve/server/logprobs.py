"""Log-probabilities in the two shapes of the API."""

from collections.abc import Sequence

from moeserve.engine.outputs import TokenLogprobs
from moeserve.server.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from moeserve.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=tokenizer.token_text(entry.token_id),
                logprob=max(entry.logprob, _LEAST),
                bytes=list(tokenizer.token_bytes(entry.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=tokenizer.token_text(token_id),
                        logprob=max(logprob, _LEAST),
                        bytes=list(tokenizer.token_bytes(token_id)),
                    )
                    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
                ],
            )
            for entry in entries
        ]
    )


class CompletionLogprobsWriter:
    """Writes one choice's tokens in order, and keeps count of the text behind it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprobs], *, unscored_token_ids: Sequence[int] = ()) -> CompletionLogprobs:
        """`unscored_token_ids` come before `entries` and have no log-probability: the first of a prompt."""
        return CompletionLogprobs(
            tokens=[
                *(self._tokenizer.token_text(token_id) for token_id in unscored_token_ids),
                *(self._tokenizer.token_text(entry.token_id) for entry in entries),
            ],
            token_logprobs=[*(None for _ in unscored_token_ids), *(max(e.logprob, _LEAST) for e in entries)],
            top_logprobs=[*(None for _ in unscored_token_ids), *(self._top(entry) for entry in entries)],
            text_offset=[
                *(self._advance(token_id) for token_id in unscored_token_ids),
                *(self._advance(entry.token_id) for entry in entries),
            ],
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the chosen one where it is not among them."""
        top = {
            self._tokenizer.token_text(token_id): max(logprob, _LEAST)
            for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        }
        top.setdefault(self._tokenizer.token_text(entry.token_id), max(entry.logprob, _LEAST))
        return top

    def _advance(self, token_id: int) -> int:
        """Where the token begins, in characters of the text: counted by the first bytes of UTF-8 characters."""
        offset = self._offset
        if token_id not in self._silent_ids:
            self._offset += sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))
        return offset
