"""Decode steps of a ladder of sizes, captured once at the start and replayed for whatever is decoded later.

A captured step is the real one: the decoder's forward pass over a ForwardBatch whose tensors never move. A step of
decodes is filled up to the next size, its inputs are copied into those tensors, and the device does the rest. Block
tables, slots, placement tables and expert weights are read from memory that stays where it is, so neither a new request
nor a migration is ever a reason to capture again.

Axes: T tokens of a size, which are as many requests; B blocks of the longest sequence there may be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from moeserve.layers.attention.kv_cache import KVCache
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.models.decoder import Decoder
from moeserve.worker.graph_recorder import GraphRecorder

_LEAST_SEQ_LEN = 2048
"""Shorter bounds of the sequences' length are not worth a graph."""
_SEQ_LEN_FACTOR = 8
"""Between two bounds: attention launches what the longest sequence would need, most of which ends at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLadder:
    """Sizes of the steps to capture, in ascending order; each number of tokens with each bound."""

    num_tokens: tuple[int, ...]
    max_seq_lens: tuple[int, ...]

    @staticmethod
    def build(*, max_num_seqs: int, max_model_len: int) -> "DecodeLadder":
        """From one token to max_num_seqs: 1, 2, 4, 8, then two sizes for each doubling, 16, 24, 32, 48, ..."""
        sizes = {1, 2, 4, 8, max_num_seqs}
        power = 16
        while power < max_num_seqs:
            sizes |= {power, power + power // 2}
            power *= 2
        bounds = [max_model_len]
        while bounds[-1] // _SEQ_LEN_FACTOR >= _LEAST_SEQ_LEN:
            bounds.append(bounds[-1] // _SEQ_LEN_FACTOR)
        return DecodeLadder(
            num_tokens=tuple(sorted(size for size in sizes if size <= max_num_seqs)),
            max_seq_lens=tuple(reversed(bounds)),
        )


class DecodeGraphs:
    """Every step of a ladder, captured; collective over the engine, whose ranks all capture and replay the same sizes.

    The bound of the sequences' length is a replica's own: no collective depends on it.
    """

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache, recorder: GraphRecorder, ladder: DecodeLadder, *, progress: bool
    ) -> None:
        """progress: whether to draw a bar."""
        device, self._ladder = decoder.parallel.device, ladder
        max_num_blocks = -(-ladder.max_seq_lens[-1] // kv_cache.block_size)
        shape = (ladder.num_tokens[-1], max_num_blocks)
        self._block_tables_TB = torch.zeros(shape, dtype=torch.int64, device=device)
        self._inputs = {size: _StepInputs(size, device) for size in ladder.num_tokens}
        self._replay: dict[tuple[int, int], Callable[[], torch.Tensor]] = {}
        dp_size = decoder.parallel.layout.dp_size
        # The largest first: the others find room in its memory.
        sizes = list(product(reversed(ladder.num_tokens), reversed(ladder.max_seq_lens)))
        for num_tokens, max_seq_len in tqdm(sizes, desc="Capturing decode", unit="step", disable=not progress):
            batch = self._inputs[num_tokens].batch(self._block_tables_TB, max_seq_len=max_seq_len, dp_size=dp_size)
            self._replay[num_tokens, max_seq_len] = recorder.capture(partial(decoder.forward, batch, kv_cache))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """`Decoder.forward` of a step in which all requests of all replicas have one token; the batch is on the CPU.

        [T, D], valid until the next step.
        """
        assert batch.max_query_len <= 1
        num_tokens = _least_of(self._ladder.num_tokens, max(batch.num_tokens_by_dp_rank))
        max_seq_len = _least_of(self._ladder.max_seq_lens, batch.max_seq_len)
        num_real, width = batch.block_tables_RB.shape
        # What lies behind is of earlier steps: blocks that exist, and that no kernel reads.
        self._block_tables_TB[:num_real, :width].copy_(batch.block_tables_RB, non_blocking=True)
        self._inputs[num_tokens].fill(batch)
        return self._replay[num_tokens, max_seq_len]()[:num_real]


class _StepInputs:
    """Inputs of one size in one piece of memory, so that a step brings them in with one copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._packed = _padding(size).to(device)
        self._query_start_loc = torch.arange(size + 1, device=device)

    def batch(self, block_tables_TB: torch.Tensor, *, max_seq_len: int, dp_size: int) -> ForwardBatch:
        """A step whose tensors are these inputs."""
        token_ids_T, positions_T, slot_mapping_T, seq_lens_T = self._packed[:-1].view(4, self._size)
        return ForwardBatch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slot_mapping_T=slot_mapping_T,
            query_start_loc=self._query_start_loc,
            seq_lens_R=seq_lens_T,
            block_tables_RB=block_tables_TB[: self._size],
            query_lens=(1,) * self._size,
            max_seq_len=max_seq_len,
            num_tokens_by_dp_rank=(self._size,) * dp_size,
            num_real_tokens_1=self._packed[-1:],
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Take over a step's inputs, with padding behind them."""
        packed = _padding(self._size)
        columns = (batch.token_ids_T, batch.positions_T, batch.slot_mapping_T, batch.seq_lens_R)
        num_real = len(batch.token_ids_T)
        torch.stack(columns, out=packed[:-1].view(4, self._size)[:, :num_real])
        packed[-1] = num_real
        self._packed.copy_(packed, non_blocking=True)


def _padding(size: int) -> torch.Tensor:
    """Inputs without a request: tokens at position 0 that are not written, of sequences that are one token long.

    Token ids, positions, slots and sequence lengths, and behind them how many are real.
    """
    packed = torch.zeros(4 * size + 1, dtype=torch.int64)
    packed[2 * size : 3 * size] = -1
    packed[3 * size : 4 * size] = 1
    return packed


def _least_of(ladder: tuple[int, ...], wanted: int) -> int:
    """The first of an ascending ladder that is not less than `wanted`."""
    return next(size for size in ladder if size >= wanted)
