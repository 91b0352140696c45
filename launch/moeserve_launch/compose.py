"""The one place where the object graph of a rank is built."""

import logging
import os
import threading
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
from moeserve.worker.device import load_native_kernels, resolve_device
from moeserve.worker.graph_recorder import graph_recorder_of
from moeserve.worker.migration import start_online_placement
from moeserve.worker.worker import FollowerLoop, LeaderExecutor, Worker, build_worker
from moeserve_launch.preflight import ServableModel
from moeserve_launch.topology import RankEnvironment, threads_per_rank

logger = logging.getLogger(__name__)


def run_engine_rank(config: Config, model: ServableModel, place: RankEnvironment) -> None:
    """Load this rank's part of the model and step until the process is ended."""
    layout = ParallelLayout.build(config.parallel, rank=place.rank, world_size=place.world_size)
    torch.set_num_threads(threads_per_rank(config.parallel, local_world_size=place.local_world_size))
    device = _device(config, place)
    parallel = init_parallel(layout, device, restart_count=place.restart_count)
    worker = build_worker(config, model.spec, model.folder, parallel, progress=place.rank == 0)
    channel = open_channel(parallel)
    address = f"tcp://{place.replica_host}:{config.server.replica_port}"
    if worker.start_placement is not None:
        worker.follow(
            start_online_placement(
                worker.decoder,
                worker.start_placement,
                parallel,
                frontend_address=address,
                window_s=config.placement.window_s,
                on_death=_end_rank,
            )
        )
    worker.capture_decode(graph_recorder_of(device), progress=place.rank == 0)
    if isinstance(channel, LeaderChannel):
        _tell_memory(config, worker, layout)
        core = _engine_core(config, model, LeaderExecutor(worker, channel), num_blocks=worker.num_blocks)
        _replica_loop(core, _ready_message(config, model, layout, worker), address, dp_size=layout.dp_size).run()
    else:
        FollowerLoop(worker, channel).run()


def _end_rank(error: BaseException) -> None:
    """A thread beside the steps has died: the rank goes down with it, wherever its main thread waits."""
    logger.critical("thread %s ended by an error", threading.current_thread().name, exc_info=error)
    os._exit(1)


def _tell_memory(config: Config, worker: Worker, layout: ParallelLayout) -> None:
    if layout.rank == 0:
        if worker.redundancy is not None:
            print(f"redundant experts (auto): {worker.redundancy.describe()}", flush=True)
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
    """This rank's device, ready for use. Native kernels were built by the supervisor, where there is one."""
    device = resolve_device(config.model.device, local_rank=place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    reason = load_native_kernels(device, may_build=not place.frontend_is_running)
    if reason is not None and place.local_rank == 0 and not place.frontend_is_running:
        logger.warning("%s", reason)
    return device
