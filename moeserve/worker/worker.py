"""A rank at work: built from the configuration, it runs the steps that its replica's leader announces."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

from moeserve.config import Config
from moeserve.engine.outputs import ModelRunnerOutput, NewRequestData, SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId, PlacementEpoch, RequestId, StepId
from moeserve.layers.attention.kv_cache import KVCache, kv_bytes_per_block
from moeserve.models.checkpoint import open_checkpoint
from moeserve.models.context_length import resolve_max_model_len
from moeserve.models.decoder import Decoder
from moeserve.models.layout import check_layout, starting_placement
from moeserve.models.spec import ModelSpec
from moeserve.parallel import ParallelContext
from moeserve.worker.agreement import StepAgreement
from moeserve.worker.channel import FollowerChannel, LeaderChannel, RunStep
from moeserve.worker.decode_graphs import DecodeLadder
from moeserve.worker.graph_recorder import GraphRecorder
from moeserve.worker.input_batch import InputBatch
from moeserve.worker.memory import agree_on_num_blocks
from moeserve.worker.migration import OnlinePlacement
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.redundancy import Redundancy, agree_on_redundancy, quantization_of
from moeserve_placement import ExpertPlacement

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class EngineStopped(Exception):  # noqa: N818 - not an error: the way out of the loop that steps
    """The replicas agreed to stop: no step runs any more."""


class Worker:
    """This rank's model with its KV cache; all ranks of the engine step together."""

    def __init__(
        self,
        decoder: Decoder,
        runner: ModelRunner,
        agreement: StepAgreement,
        *,
        placement: ExpertPlacement | None,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int,
        redundancy: Redundancy | None = None,
    ) -> None:
        self.decoder = decoder
        self.start_placement = placement
        """Of the experts, as they were loaded; None for a model without any."""
        self.redundancy = redundancy
        """Where it was left to the rank."""
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._runner = runner
        self._agreement = agreement
        self._online: OnlinePlacement | None = None

    def follow(self, online: OnlinePlacement) -> None:
        """From the next step on commit changes of the placement, and count loads."""
        self._online = online

    def has_staged(self, change_id: int) -> bool:
        """Whether this rank could commit the change."""
        return self._online is not None and self._online.has_staged(change_id)

    def step(self, step: RunStep) -> ModelRunnerOutput:
        """Agree with the other replicas, then run the step; raises EngineStopped if one of them votes to stop."""
        output, online = step.output, self._online
        agreed = self._agreement.agree(
            output.total_num_scheduled_tokens,
            is_decode=all(num_tokens == 1 for num_tokens in output.num_scheduled_tokens.values()),
            votes_stop=step.votes_stop,
            placement_epoch=PlacementEpoch(0) if online is None else online.epoch,
            commit_vote=step.commit_vote,
        )
        if agreed.engine_stops:
            raise EngineStopped
        if online is not None:
            online.settle(committed_change=agreed.committed_change, dropped_change=step.dropped_change)
        is_measured = online is not None and not agreed.engine_is_idle
        with online.measure(output) if online is not None and is_measured else nullcontext():
            return self._runner.execute(output, agreed)

    def capture_decode(self, recorder: GraphRecorder | None, *, progress: bool) -> None:
        """Capture decode steps of every size, where the device has a recorder; collective over the engine.

        What counts loads must be in its place: call it behind `follow`. progress: whether rank 0 draws a bar.
        """
        if recorder is not None:
            ladder = DecodeLadder.build(max_num_seqs=self._max_num_seqs, max_model_len=self.max_model_len)
            self._runner.capture_decode(recorder, ladder, progress=progress)

    def forget_all(self) -> None:
        """Drop every request, when the scheduler that knew them is gone."""
        self._runner.forget_all()


class LeaderExecutor:
    """The engine's StepExecutor on a replica's leader: tells the followers, then steps with them."""

    def __init__(self, worker: Worker, channel: LeaderChannel) -> None:
        self._worker = worker
        self._channel = channel
        self._votes_stop = False
        self._wanted_change = 0
        self._dropped_change = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Blocks until the step is done; raises EngineStopped once a replica has voted to stop."""
        step = RunStep(
            output=output,
            votes_stop=self._votes_stop,
            # One that is not staged here was meant for ranks before a restart, or is committed.
            commit_vote=self._wanted_change if self._worker.has_staged(self._wanted_change) else 0,
            dropped_change=self._dropped_change,
        )
        self._channel.send(step)
        return self._worker.step(step)

    def commit_change(self, change_id: int) -> None:
        """Vote for this change of the placement in every step, until it is committed or withdrawn."""
        if change_id > self._dropped_change:
            self._wanted_change = change_id

    def drop_change(self, change_id: int) -> None:
        """Withdraw the vote for this change and any before it, for ever."""
        self._dropped_change = max(self._dropped_change, change_id)
        if self._wanted_change <= change_id:
            self._wanted_change = 0

    def vote_stop(self) -> None:
        """Have the next step end the engine, on all ranks; safe in a signal handler."""
        self._votes_stop = True

    def close(self) -> None:
        """End the followers' loops."""
        self._channel.close()


class FollowerLoop:
    """The life of a rank with tp_rank > 0: run what the leader announces until it says stop."""

    def __init__(self, worker: Worker, channel: FollowerChannel) -> None:
        self._worker = worker
        self._channel = channel

    def run(self) -> None:
        """Returns after Stop, or when the engine stops; raises ParentDiedError in an orphaned process."""
        try:
            while isinstance(message := self._channel.receive(), RunStep):
                self._worker.step(message)
        except EngineStopped:
            logger.info("the engine stops")
        finally:
            self._channel.close()


def build_worker(config: Config, spec: ModelSpec, folder: Path, parallel: ParallelContext, *, progress: bool) -> Worker:
    """Load this rank's share of the checkpoint, allocate its KV cache and warm it up; collective over the engine.

    progress: whether rank 0 draws a bar. Raises ConfigError for a layout, placement, context length or memory size
    that cannot be, and CheckpointError for a broken checkpoint.
    """
    check_layout(spec, config.parallel)
    max_model_len = resolve_max_model_len(config, spec)
    dtype = resolve_dtype(config, spec)
    block_size, max_num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else _TORCH_DTYPES[config.cache.kv_cache_dtype]
    bytes_per_block = kv_bytes_per_block(spec, block_size=block_size, dtype=kv_dtype, tp_size=parallel.layout.tp_size)
    redundancy = agree_on_redundancy(
        config,
        spec,
        parallel,
        dtype=dtype,
        num_spare_places=_num_spare_places(config, parallel),
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
    )
    placement = None
    if spec.moe_layer_ids:
        num_redundant = None if redundancy is None else redundancy.num_redundant_experts
        placement = starting_placement(spec, config.parallel, auto_redundant_experts=num_redundant)
    decoder = _load_decoder(config, spec, folder, parallel, placement, dtype=dtype, progress=progress)
    num_blocks = agree_on_num_blocks(
        config.cache,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        parallel=parallel,
    )
    kv_cache = KVCache.allocate(spec, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, parallel=parallel)
    input_batch = InputBatch(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
    runner = ModelRunner(decoder, kv_cache, input_batch, parallel=parallel)
    worker = Worker(
        decoder,
        runner,
        StepAgreement(parallel),
        placement=placement,
        redundancy=redundancy,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    for output in _warm_up_steps(num_tokens=min(4, max_model_len), block_size=block_size):
        worker.step(RunStep(output=output))
    return worker


def _load_decoder(
    config: Config,
    spec: ModelSpec,
    folder: Path,
    parallel: ParallelContext,
    placement: ExpertPlacement | None,
    *,
    dtype: torch.dtype,
    progress: bool,
) -> Decoder:
    reader = open_checkpoint(folder, spec, dtype, quantization=quantization_of(config.model))
    is_shown = progress and parallel.layout.rank == 0
    with tqdm(total=len(spec.layers), desc="Loading weights", unit="layer", disable=not is_shown) as bar:

        def on_layer_loaded(layer: int) -> None:
            bar.update(layer + 1 - bar.n)

        return Decoder.build(
            spec,
            reader,
            parallel,
            placement,
            dtype=dtype,
            num_spare_places=_num_spare_places(config, parallel),
            on_layer_loaded=on_layer_loaded,
        )


def _num_spare_places(config: Config, parallel: ParallelContext) -> int:
    return config.placement.spare_places if parallel.layout.world_size > 1 else 0


def _warm_up_steps(*, num_tokens: int, block_size: int) -> Iterator[SchedulerOutput]:
    """A prefill, a decode and an idle step, so that the first request does not pay for first calls.

    They are steps as any other. What they leave in the KV cache is finite and is overwritten before it is read.
    """
    request_id = RequestId("warm-up")
    for num_computed_tokens in (0, num_tokens - 1):
        request = NewRequestData(
            request_id=request_id,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling_params=SamplingParams(seed=0),
            block_ids=[BlockId(block) for block in range(-(-num_tokens // block_size))],
            num_computed_tokens=num_computed_tokens,
        )
        yield SchedulerOutput(
            step_id=StepId(0),
            new_requests=[request],
            num_scheduled_tokens={request_id: num_tokens - num_computed_tokens},
            finished_request_ids=[request_id],
        )
    yield SchedulerOutput(step_id=StepId(0), finished_request_ids=[request_id])


def resolve_dtype(config: Config, spec: ModelSpec) -> torch.dtype:
    """The type the model computes in."""
    return _TORCH_DTYPES[spec.dtype if config.model.dtype == "auto" else config.model.dtype]
