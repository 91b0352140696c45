"""What a rank remembers of its requests, and the tensors of a step made from it.

`InputBatch` lasts over the steps: one table row for each request the scheduler has told us of. `StepInputs` is the
value of one step. A row is given back when the scheduler says that the request is finished or preempted.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeserve.engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId, RequestId
from moeserve.layers.forward_batch import ForwardBatch

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One request as the sampler sees it in one step; the arrays are views that hold until the next update."""

    request_id: RequestId
    params: SamplingParams
    token_ids: npt.NDArray[np.int32]
    """All tokens known."""
    num_prompt_tokens: int

    @property
    def output_token_ids(self) -> npt.NDArray[np.int32]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Prompt positions of one request whose successors' log-probabilities were asked for."""

    request_id: RequestId
    num_logprobs: int
    start: int
    """Position of the first token that is judged: `targets[0]`."""
    hidden_start: int
    """Row of the hidden states that predicts `targets[0]`; the next rows predict the next targets."""
    targets: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step of one replica: tensors for the decoder, and what to do with its hidden states."""

    forward: ForwardBatch
    sampled: tuple[SequenceView, ...]
    """Requests whose last known token is computed in this step."""
    sampled_hidden_rows: Int64s
    """Row of the hidden states of each sampled request's last token."""
    prompt_chunks: tuple[PromptChunk, ...]


class InputBatch:
    """The requests of one replica on one rank: tokens, blocks and sampling settings, by table row."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_num_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        # Pages of the tables that no request has reached yet cost no memory.
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._block_ids = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.clear()

    @property
    def num_requests(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        """Forget all requests."""
        self._params: dict[RequestId, SamplingParams] = {}
        self._rows: dict[RequestId, int] = {}
        self._free_rows = list(range(len(self._num_tokens)))[::-1]

    def update(self, output: SchedulerOutput) -> None:
        """Take over what the scheduler says: first what to forget, then what is new, then what has changed."""
        for request_id in output.finished_request_ids:
            self._forget(request_id)
        for new in output.new_requests:
            self._add(new)
        for cached in output.cached_requests:
            self._advance(cached)

    def build(
        self, output: SchedulerOutput, num_tokens_by_dp_rank: tuple[int, ...], device: torch.device
    ) -> StepInputs:
        """The step's tensors, after `update`; requests stand in the order of `num_scheduled_tokens`."""
        request_ids = list(output.num_scheduled_tokens)
        rows_R = np.fromiter((self._rows[r] for r in request_ids), dtype=np.int64, count=len(request_ids))
        query_lens_R = np.fromiter(output.num_scheduled_tokens.values(), dtype=np.int64, count=len(request_ids))
        start_loc = np.zeros(len(request_ids) + 1, dtype=np.int64)
        np.cumsum(query_lens_R, out=start_loc[1:])
        forward = self._build_forward(rows_R, query_lens_R, start_loc, num_tokens_by_dp_rank, device)

        is_sampled_R = self._num_computed_tokens[rows_R] + query_lens_R == self._num_tokens[rows_R]
        sampled = np.flatnonzero(is_sampled_R)
        return StepInputs(
            forward=forward,
            sampled=tuple(self._view(request_ids[i]) for i in sampled),
            sampled_hidden_rows=start_loc[sampled + 1] - 1,
            prompt_chunks=self._prompt_chunks(request_ids, query_lens_R, start_loc),
        )

    def _build_forward(
        self,
        rows_R: Int64s,
        query_lens_R: Int64s,
        start_loc: Int64s,
        num_tokens_by_dp_rank: tuple[int, ...],
        device: torch.device,
    ) -> ForwardBatch:
        computed_R = self._num_computed_tokens[rows_R]
        seq_lens_R = computed_R + query_lens_R
        assert (query_lens_R > 0).all(), "a scheduled request has at least one token"
        assert (seq_lens_R <= self._num_tokens[rows_R]).all(), "tokens were scheduled that nobody knows"
        num_used_blocks_R = -(-seq_lens_R // self._block_size)
        assert (num_used_blocks_R <= self._num_blocks[rows_R]).all(), "tokens were scheduled without a block for them"

        rows_T = np.repeat(rows_R, query_lens_R)
        positions_T = np.arange(start_loc[-1], dtype=np.int64) + np.repeat(computed_R - start_loc[:-1], query_lens_R)
        blocks_T = self._block_ids[rows_T, positions_T // self._block_size].astype(np.int64)
        slots_T = blocks_T * self._block_size + positions_T % self._block_size

        width = int(num_used_blocks_R.max(initial=0))
        is_used_RB = np.arange(width) < num_used_blocks_R[:, None]
        tables_RB = np.where(is_used_RB, self._block_ids[rows_R, :width], 0).astype(np.int64)

        def tensor(array: Int64s) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return ForwardBatch(
            token_ids_T=tensor(self._token_ids[rows_T, positions_T].astype(np.int64)),
            positions_T=tensor(positions_T),
            slot_mapping_T=tensor(slots_T),
            query_start_loc=tensor(start_loc),
            seq_lens_R=tensor(seq_lens_R),
            block_tables_RB=tensor(tables_RB),
            query_lens=tuple(query_lens_R.tolist()),
            max_seq_len=int(seq_lens_R.max(initial=0)),
            num_tokens_by_dp_rank=num_tokens_by_dp_rank,
        )

    def _prompt_chunks(
        self, request_ids: list[RequestId], query_lens_R: Int64s, start_loc: Int64s
    ) -> tuple[PromptChunk, ...]:
        chunks = []
        for i, request_id in enumerate(request_ids):
            num_logprobs = self._params[request_id].prompt_logprobs
            if num_logprobs is None:
                continue
            row = self._rows[request_id]
            start = int(self._num_computed_tokens[row]) + 1
            end = min(start + int(query_lens_R[i]), int(self._num_prompt_tokens[row]))
            if start >= end:
                continue
            chunks.append(
                PromptChunk(
                    request_id=request_id,
                    num_logprobs=num_logprobs,
                    start=start,
                    hidden_start=int(start_loc[i]),
                    targets=self._token_ids[row, start:end].astype(np.int64),
                )
            )
        return tuple(chunks)

    def _view(self, request_id: RequestId) -> SequenceView:
        row = self._rows[request_id]
        return SequenceView(
            request_id=request_id,
            params=self._params[request_id],
            token_ids=self._token_ids[row, : self._num_tokens[row]],
            num_prompt_tokens=int(self._num_prompt_tokens[row]),
        )

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self._rows, f"request {new.request_id} is known already"
        assert self._free_rows, f"more than {len(self._num_tokens)} requests at once"
        row = self._free_rows.pop()
        self._rows[new.request_id] = row
        self._params[new.request_id] = new.sampling_params
        self._num_tokens[row] = self._num_blocks[row] = 0
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._num_computed_tokens[row] = new.num_computed_tokens
        self._append(row, new.token_ids, new.block_ids)

    def _advance(self, cached: CachedRequestData) -> None:
        row = self._rows[cached.request_id]
        self._num_computed_tokens[row] = cached.num_computed_tokens
        self._append(row, cached.new_token_ids, cached.new_block_ids)

    def _append(self, row: int, token_ids: list[int], block_ids: list[BlockId]) -> None:
        start, first_block = int(self._num_tokens[row]), int(self._num_blocks[row])
        self._token_ids[row, start : start + len(token_ids)] = token_ids
        self._block_ids[row, first_block : first_block + len(block_ids)] = block_ids
        self._num_tokens[row] += len(token_ids)
        self._num_blocks[row] += len(block_ids)

    def _forget(self, request_id: RequestId) -> None:
        # A request that was aborted before it ever ran is news to us; that is fine.
        row = self._rows.pop(request_id, None)
        if row is not None:
            del self._params[request_id]
            self._free_rows.append(row)
