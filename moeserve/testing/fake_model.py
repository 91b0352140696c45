"""A language model without weights that uses a KV cache like a real one, so that a wrong block gives wrong tokens.

The "KV" of a token is the hash of it and of the KV of the token before it. The next token is a function of the last KV.
`PagedFakeModel` keeps the KV in slots and finds the token before by the block table: a block that is shared wrongly,
reused too early or not computed changes the output. `generate` is the same model without a cache: what must come out.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from moeserve.engine.outputs import FinishReason, TokenLogprobs
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId

NextToken = Callable[[int, Sequence[int], int], int]
"""(KV of the last token, all tokens of the sequence, number of prompt tokens) -> the next token."""

_START = 0


def fake_kv(previous: int, token_id: int) -> int:
    data = previous.to_bytes(8, "little") + token_id.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def hashed_token(vocab_size: int) -> NextToken:
    """Any token of the vocabulary, all alike."""
    return lambda kv, token_ids, num_prompt_tokens: kv % vocab_size


class PagedFakeModel:
    """The KV cache: one number for each slot, None where nothing was computed."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[int, int] = {}

    def compute(self, token_ids: Sequence[int], block_table: Sequence[BlockId], positions: range) -> int:
        """Write the KV of these positions of a sequence; returns that of the last."""
        kv = _START if positions.start == 0 else self._slots[self._slot(block_table, positions.start - 1)]
        for position in positions:
            kv = fake_kv(kv, token_ids[position])
            self._slots[self._slot(block_table, position)] = kv
        return kv

    def _slot(self, block_table: Sequence[BlockId], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size


def generate(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    next_token: NextToken,
    *,
    eos_token_ids: Iterable[int] = (),
) -> tuple[list[int], FinishReason]:
    """Output of a request that runs alone, and why it ends."""
    eos = set() if params.ignore_eos else set(eos_token_ids)
    token_ids, kv = list(prompt_token_ids), _START
    for token_id in token_ids:
        kv = fake_kv(kv, token_id)
    for count in range(1, params.max_tokens + 1):
        token_ids.append(next_token(kv, token_ids, len(prompt_token_ids)))
        if count >= params.min_tokens and (token_ids[-1] in eos or token_ids[-1] in params.stop_token_ids):
            return token_ids[len(prompt_token_ids) :], FinishReason.STOP
        kv = fake_kv(kv, token_ids[-1])
    return token_ids[len(prompt_token_ids) :], FinishReason.LENGTH


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Made up, but with the right shapes: the token itself is the most likely one, then its neighbours."""
    return TokenLogprobs(
        token_id=token_id,
        logprob=-0.5,
        rank=1,
        top_token_ids=[token_id ^ i for i in range(num_top)],
        top_logprobs=[-0.5 - i for i in range(num_top)],
    )
