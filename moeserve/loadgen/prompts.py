"""From the blocks of a planned prompt to what is sent: token ids of exact number, or pieces of text."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from moeserve.loadgen.traffic import PromptBlock

_FIRST_ORDINARY_ID = 3
"""Lower ids are special tokens in many tokenizers."""


class PromptMaker(Protocol):
    """Equal blocks at the start of two prompts become equal beginnings."""

    def make(self, blocks: Sequence[PromptBlock]) -> str | list[int]: ...


class TokenIdPrompts:
    """Random token ids, as many as the blocks ask for."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: ids are below it, whatever the model has."""
        if vocab_size <= _FIRST_ORDINARY_ID:
            raise ValueError(f"vocab size must be above {_FIRST_ORDINARY_ID}, got {vocab_size}")
        self._vocab_size = vocab_size

    def make(self, blocks: Sequence[PromptBlock]) -> list[int]:
        ids: list[int] = []
        for block in blocks:
            rng = np.random.default_rng(block.seed)
            ids += rng.integers(_FIRST_ORDINARY_ID, self._vocab_size, size=block.num_tokens).tolist()
        return ids


class TextPrompts:
    """Pieces from random places of texts. How many tokens they are, the server's tokenizer decides."""

    def __init__(self, text_by_domain: Mapping[str, str], *, chars_per_token: float) -> None:
        self._texts = dict(text_by_domain)
        self._chars_per_token = chars_per_token

    def make(self, blocks: Sequence[PromptBlock]) -> str:
        return "".join(self._piece(block) for block in blocks)

    def _piece(self, block: PromptBlock) -> str:
        rng = np.random.default_rng(block.seed)
        domain = block.domain or sorted(self._texts)[rng.integers(len(self._texts))]
        text = self._texts[domain]
        start = int(rng.integers(len(text)))
        num_chars = max(1, round(block.num_tokens * self._chars_per_token))
        repeats = (start + num_chars) // len(text) + 1
        return (text * repeats)[start : start + num_chars]
