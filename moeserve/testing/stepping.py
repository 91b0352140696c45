"""One sequence through a decoder in steps of any size, over a block table that is in no order."""

import torch

from moeserve.layers.attention.kv_cache import KVCache
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.models.decoder import Decoder


class SequenceStepper:
    """A sequence of at most `max_len` tokens with a KV cache to itself."""

    def __init__(self, decoder: Decoder, max_len: int, *, block_size: int = 16) -> None:
        num_blocks = -(-max_len // block_size) + 1
        self._decoder = decoder
        self._block_size = block_size
        self._kv_cache = KVCache.allocate(
            decoder.spec, num_blocks=num_blocks, block_size=block_size, dtype=decoder.dtype, parallel=decoder.parallel
        )
        # Last block first, and block 0, where padding points to, is not the sequence's.
        self._block_table = list(range(num_blocks - 1, 0, -1))
        self._num_computed = 0

    @torch.inference_mode()
    def step(self, token_ids: list[int]) -> torch.Tensor:
        """The next tokens; returns [T, V] float32, the logits behind each of them."""
        batch = self._batch(token_ids)
        self._num_computed += len(token_ids)
        return self._decoder.compute_logits(self._decoder.forward(batch, self._kv_cache))

    def _batch(self, token_ids: list[int]) -> ForwardBatch:
        positions = range(self._num_computed, self._num_computed + len(token_ids))
        return ForwardBatch(
            token_ids_T=torch.tensor(token_ids),
            positions_T=torch.tensor(positions),
            slot_mapping_T=torch.tensor([self._slot(position) for position in positions]),
            query_start_loc=torch.tensor([0, len(token_ids)]),
            seq_lens_R=torch.tensor([positions.stop]),
            block_tables_RB=torch.tensor([self._block_table]),
            query_lens=(len(token_ids),),
            max_seq_len=positions.stop,
            num_tokens_by_dp_rank=(len(token_ids),),
        )

    def _slot(self, position: int) -> int:
        return self._block_table[position // self._block_size] * self._block_size + position % self._block_size


def logits_in_chunks(decoder: Decoder, token_ids: list[int], chunk_size: int) -> torch.Tensor:
    """[T, V] float32: the logits at every position, `chunk_size` tokens in a step."""
    stepper = SequenceStepper(decoder, len(token_ids))
    starts = range(0, len(token_ids), chunk_size)
    return torch.cat([stepper.step(token_ids[start : start + chunk_size]) for start in starts])


def greedy_with_logits(decoder: Decoder, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Decode token by token from the prompt's first on: the text, and the logits [T - 1, V] that led to it."""
    stepper = SequenceStepper(decoder, len(prompt) + num_tokens)
    token_ids, logits = list(prompt), []
    for position in range(len(prompt) + num_tokens - 1):
        logits.append(stepper.step([token_ids[position]]))
        if position + 1 == len(token_ids):
            token_ids.append(int(logits[-1].argmax()))
    return token_ids, torch.cat(logits)
