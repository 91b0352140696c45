"""The one place where the object graph of a rank is built."""

import os
import time
import uuid

import torch

from moeserve.config import Config
from moeserve.engine.core import EngineCore
from moeserve.engine.messages import ReplicaReady
from moeserve.engine.replica_loop import ReplicaLoop
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import DpRank
from moeserve.parallel import ParallelLayout, init_parallel
from moeserve.worker.channel import LeaderChannel, open_channel
from moeserve.worker.worker import FollowerLoop, LeaderExecutor, Worker, build_worker
from moeserve_launch.preflight import ServableModel
from moeserve_launch.topology import RankEnvironment, threads_per_rank


def run_engine_rank(config: Config, model: ServableModel, place: RankEnvironment) -> None:
    """Load this rank's part of the model and step until the process is ended."""
    layout = ParallelLayout.build(config.parallel, rank=place.rank, world_size=place.world_size)
    torch.set_num_threads(threads_per_rank(config.parallel, local_world_size=place.local_world_size))
    parallel = init_parallel(layout, _device(config, place), restart_count=place.restart_count)
    worker = build_worker(config, model.spec, model.folder, parallel, progress=place.rank == 0)
    channel = open_channel(parallel)
    if isinstance(channel, LeaderChannel):
        _tell_kv_size(config, worker, layout)
        core = _engine_core(config, model, LeaderExecutor(worker, channel), num_blocks=worker.num_blocks)
        address = f"tcp://{place.replica_host}:{config.server.replica_port}"
        _replica_loop(core, _ready_message(config, model, layout, worker), address, dp_size=layout.dp_size).run()
    else:
        FollowerLoop(worker, channel).run()


def _tell_kv_size(config: Config, worker: Worker, layout: ParallelLayout) -> None:
    if layout.rank == 0:
        num_tokens = worker.num_blocks * config.cache.block_size
        print(f"KV cache of each DP replica: {worker.num_blocks:,} blocks, {num_tokens:,} tokens", flush=True)


def _engine_core(config: Config, model: ServableModel, executor: LeaderExecutor, *, num_blocks: int) -> EngineCore:
    scheduler = Scheduler(
        config.scheduler,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.spec.eos_token_ids,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    return EngineCore(scheduler, executor, time.monotonic)


def _ready_message(config: Config, model: ServableModel, layout: ParallelLayout, worker: Worker) -> ReplicaReady:
    return ReplicaReady(
        dp_rank=DpRank(layout.dp_rank),
        incarnation=f"{os.getpid()}-{uuid.uuid4().hex}",
        num_blocks=worker.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=model.max_model_len,
    )


def _replica_loop(core: EngineCore, ready: ReplicaReady, address: str, *, dp_size: int) -> ReplicaLoop:
    return ReplicaLoop(
        core,
        frontend_address=address,
        dp_rank=ready.dp_rank,
        dp_size=dp_size,
        incarnation=ready.incarnation,
        ready=ready,
    )


def _device(config: Config, place: RankEnvironment) -> torch.device:
    wants_cuda = config.model.device == "cuda" or (config.model.device == "auto" and torch.cuda.is_available())
    if not wants_cuda:
        return torch.device("cpu")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)
