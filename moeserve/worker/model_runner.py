"""One step on one rank: inputs from the scheduler's output, the forward pass, and on the leader the sampled tokens."""

from collections.abc import Iterator

import numpy as np
import torch

from moeserve.engine.outputs import ModelRunnerOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs
from moeserve.layers.attention.kv_cache import KVCache
from moeserve.models.decoder import Decoder
from moeserve.parallel import ParallelContext
from moeserve.worker.agreement import AgreedStep
from moeserve.worker.decode_graphs import DecodeGraphs, DecodeLadder
from moeserve.worker.graph_recorder import GraphRecorder
from moeserve.worker.input_batch import InputBatch, PromptChunk, StepInputs
from moeserve.worker.logprobs import token_logprobs
from moeserve.worker.sampler import Sampler

_PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits are held at once."""


class ModelRunner:
    """Owns the decoder, its KV cache and the requests' state on this rank."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache, input_batch: InputBatch, *, parallel: ParallelContext
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._input_batch = input_batch
        self._parallel = parallel
        self._decode_graphs: DecodeGraphs | None = None
        self._sampler = Sampler(eos_token_ids=decoder.spec.eos_token_ids)

    @torch.inference_mode()
    def capture_decode(self, recorder: GraphRecorder, ladder: DecodeLadder, *, progress: bool) -> None:
        """Have decode steps replayed from now on; collective over the engine."""
        is_shown = progress and self._parallel.layout.rank == 0
        self._decode_graphs = DecodeGraphs(self._decoder, self._kv_cache, recorder, ladder, progress=is_shown)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, agreed: AgreedStep) -> ModelRunnerOutput:
        """Run the step; collective over the engine, unless nobody has a token: then only the news are taken over.

        Followers (tp_rank > 0) compute the same logits, because the vocabulary is split, but sample nothing.
        """
        self._input_batch.update(output)
        if agreed.engine_is_idle:
            return ModelRunnerOutput(step_id=output.step_id, engine_is_idle=True)
        step, hidden_TD = self._forward(output, agreed)
        prompt_logprobs = list(self._prompt_logprobs(hidden_TD, step.prompt_chunks))
        if not step.sampled:
            return ModelRunnerOutput(step_id=output.step_id, prompt_logprobs=prompt_logprobs)
        logits_RV = self._decoder.compute_logits(hidden_TD[self._to_device(step.sampled_hidden_rows)])
        sampled = self._sampler.sample(logits_RV, step.sampled) if self._parallel.layout.is_leader else []
        return ModelRunnerOutput(step_id=output.step_id, sampled=sampled, prompt_logprobs=prompt_logprobs)

    def _forward(self, output: SchedulerOutput, agreed: AgreedStep) -> tuple[StepInputs, torch.Tensor]:
        """The step, and the hidden states [T, D] of its tokens."""
        if self._decode_graphs is not None and agreed.is_decode:
            step = self._input_batch.build(output, agreed.num_tokens_by_dp_rank, torch.device("cpu"))
            return step, self._decode_graphs.forward(step.forward)
        step = self._input_batch.build(output, agreed.num_tokens_by_dp_rank, self._parallel.device)
        return step, self._decoder.forward(step.forward, self._kv_cache)

    def forget_all(self) -> None:
        """Take no request for known any more."""
        self._input_batch.clear()

    def _prompt_logprobs(self, hidden_TD: torch.Tensor, chunks: tuple[PromptChunk, ...]) -> Iterator[PromptLogprobs]:
        """Judge the prompt positions of all chunks, a bounded number at a time; followers yield nothing."""
        if not chunks:
            return
        spans = [np.arange(c.hidden_start, c.hidden_start + len(c.targets)) for c in chunks]
        hidden_rows = self._to_device(np.concatenate(spans))
        targets = self._to_device(np.concatenate([c.targets for c in chunks]))
        num_top = [c.num_logprobs for c in chunks for _ in range(len(c.targets))]
        records: list[TokenLogprobs] = []
        for start in range(0, len(num_top), _PROMPT_LOGITS_ROWS):
            part = slice(start, start + _PROMPT_LOGITS_ROWS)
            logits_NV = self._decoder.compute_logits(hidden_TD[hidden_rows[part]])
            if self._parallel.layout.is_leader:
                records += token_logprobs(logits_NV, targets[part], num_top[part])
        if not self._parallel.layout.is_leader:
            return
        remaining = iter(records)
        for chunk in chunks:
            judged = [next(remaining) for _ in chunk.targets]
            yield PromptLogprobs(request_id=chunk.request_id, start=chunk.start, logprobs=judged)

    def _to_device(self, rows: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> torch.Tensor:
        return torch.from_numpy(rows).to(self._parallel.device, non_blocking=True)
