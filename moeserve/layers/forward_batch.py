"""The tensors of one step, as every layer sees them: one value, built by the worker, passed by argument."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of R requests, each request's tokens contiguous; prefill, chunked prefill and decode are one shape.

    A replica without work in a step of its engine has T = R = 0 and still runs every layer's dispatch and combine.
    """

    token_ids_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64, place of each token in its sequence."""
    slot_mapping_T: torch.Tensor
    """int64, block_id * block_size + offset in the KV cache; -1: do not write."""
    query_start_loc: torch.Tensor
    """int64 [R + 1], prefix sums of the requests' token counts."""
    seq_lens_R: torch.Tensor
    """int64, tokens of each sequence up to and with this step."""
    block_tables_RB: torch.Tensor
    """int64, KV blocks of each request in order, padded with 0 behind the last used one."""
    query_lens: tuple[int, ...]
    """Token count of each request, on the host."""
    max_seq_len: int
    """On the host: the largest of `seq_lens_R`, or a bound for it."""
    num_tokens_by_dp_rank: tuple[int, ...]
    """T of every replica of the engine in this step."""
    num_real_tokens_1: torch.Tensor | None = None
    """int64, in a step of fixed shapes: tokens from there on fill it up, each as a request of its own that reads one
    position, writes none, and goes to no expert. Nothing else about the step is known on the host."""

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that decode: those of the leading requests with one token each. The scheduler puts decodes first; a
        prompt of one token right behind them counts as one."""
        return count_decode_tokens(self.query_lens)

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the same step is to serve other tokens, as many of them and fewer."""
        return self.num_real_tokens_1 is not None


def count_decode_tokens(query_lens: Iterable[int]) -> int:
    """`ForwardBatch.num_decode_tokens` of a batch with these token counts."""
    return sum(takewhile(lambda query_len: query_len == 1, query_lens))
