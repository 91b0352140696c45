"""Which replica computed the beginning of a prompt lately, so that its prefix cache is used again."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from moeserve.ids import DpRank

_CHUNK_TOKENS = 64


class PrefixAffinity:
    """Remembers the leading chunks of the prompts that each replica was given, the newest `max_chunks` of each.

    A guess, not the truth: the replica may have evicted the blocks. So its weight must be bounded by who asks.
    """

    def __init__(self, *, max_chunks: int = 8192) -> None:
        self._max_chunks = max_chunks
        self._chunks: dict[DpRank, OrderedDict[int, None]] = {}

    def record(self, dp_rank: DpRank, prompt_token_ids: Sequence[int], cache_salt: str) -> None:
        chunks = self._chunks.setdefault(dp_rank, OrderedDict())
        for key in _chain(prompt_token_ids, cache_salt):
            chunks[key] = None
            chunks.move_to_end(key)
        while len(chunks) > self._max_chunks:
            chunks.popitem(last=False)

    def forget(self, dp_rank: DpRank) -> None:
        """The replica's cache is gone."""
        self._chunks.pop(dp_rank, None)

    def num_known_tokens(self, dp_rank: DpRank, prompt_token_ids: Sequence[int], cache_salt: str) -> int:
        """Leading tokens of the prompt that the replica was given before, in whole chunks."""
        chunks = self._chunks.get(dp_rank, OrderedDict())
        known = 0
        for key in _chain(prompt_token_ids, cache_salt):
            if key not in chunks:
                break
            known += _CHUNK_TOKENS
        return known


def _chain(token_ids: Sequence[int], cache_salt: str) -> Iterator[int]:
    """A key for each whole chunk, which depends on everything before it."""
    key = hash(cache_salt)
    for start in range(0, len(token_ids) - _CHUNK_TOKENS + 1, _CHUNK_TOKENS):
        key = hash((key, *token_ids[start : start + _CHUNK_TOKENS]))
        yield key
