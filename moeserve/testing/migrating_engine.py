"""Real ranks, as threads or processes, under a fake frontend that migrates experts between them."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from moeserve.config import Config, ParallelConfig, config_from_dict
from moeserve.engine.core import EngineCore
from moeserve.engine.messages import AddRequest, ReplicaReady
from moeserve.engine.placement_messages import DropChange
from moeserve.engine.replica_loop import ReplicaLoop
from moeserve.engine.sampling_params import SamplingParams
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import DpRank, RequestId
from moeserve.models.hf_config import read_model_spec
from moeserve.parallel import ParallelContext, ParallelLayout, init_parallel, single_rank_context
from moeserve.testing.change_driver import ChangeDriver
from moeserve.testing.fake_frontend import FakeFrontend, listening_frontend
from moeserve.testing.multiprocess import run_ranks
from moeserve.testing.recorders import RepeatingRecorder
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.worker.channel import FollowerChannel, open_channel
from moeserve.worker.migration import start_online_placement
from moeserve.worker.worker import EngineStopped, FollowerLoop, LeaderExecutor, build_worker

_MAX_TOKENS = 40
_START_TIMEOUT_MS = 120_000
_BLOCK_SIZE, _MAX_MODEL_LEN = 4, 64


class Event(Protocol):
    """Of threading, or of multiprocessing."""

    def wait(self) -> Any:
        """Until it is set."""
        ...

    def set(self) -> None:
        """Let all who wait go on."""
        ...


def _config(parallel: ParallelConfig) -> Config:
    config = config_from_dict(
        {
            "model": {"max_model_len": _MAX_MODEL_LEN},
            "cache": {"block_size": _BLOCK_SIZE, "kv_cache_memory": 64 * 1024},
            "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
            "placement": {"window_s": 0.01},
        }
    )
    return replace(config, parallel=parallel)


def request(number: int) -> AddRequest:
    """Greedy or sampled; prompts that are longer than a step takes are among them."""
    generator = torch.Generator().manual_seed(number)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}]
    return AddRequest(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=torch.randint(3, 300, (1 + 9 * (number % 3),), generator=generator).tolist(),
        sampling_params=SamplingParams(max_tokens=_MAX_TOKENS, seed=number, ignore_eos=True, **kinds[number % 2]),
    )


def _new_core(config: Config, executor: LeaderExecutor, num_blocks: int) -> EngineCore:
    scheduler = Scheduler(
        config.scheduler, num_blocks=num_blocks, block_size=_BLOCK_SIZE, max_model_len=_MAX_MODEL_LEN, eos_token_ids=()
    )
    return EngineCore(scheduler, executor, lambda: 0.0)


def _live(
    folder: Path,
    config: Config,
    address: str,
    stop: Event,
    parallel: ParallelContext,
    *,
    replays_decodes: bool = False,
) -> None:
    """Life of one rank, until `stop`."""
    layout = parallel.layout
    deaths: list[BaseException] = []
    worker = build_worker(config, read_model_spec(folder), folder, parallel, progress=False)
    channel = open_channel(parallel)
    assert worker.start_placement is not None
    online = start_online_placement(
        worker.decoder,
        worker.start_placement,
        parallel,
        frontend_address=address,
        window_s=config.placement.window_s,
        on_death=deaths.append,
    )
    worker.follow(online)
    worker.capture_decode(RepeatingRecorder() if replays_decodes else None, progress=False)
    if isinstance(channel, FollowerChannel):
        FollowerLoop(worker, channel).run()
    else:
        executor = LeaderExecutor(worker, channel)
        loop = _replica_loop(_new_core(config, executor, worker.num_blocks), layout, address, worker.num_blocks)

        def vote_when_told() -> None:
            stop.wait()
            executor.vote_stop()

        threading.Thread(target=vote_when_told, daemon=True).start()
        with suppress(EngineStopped):
            loop.run()
        executor.close()
    online.close()
    assert not deaths


def _replica_loop(core: EngineCore, layout: ParallelLayout, address: str, num_blocks: int) -> ReplicaLoop:
    dp_rank = DpRank(layout.dp_rank)
    ready = ReplicaReady(
        dp_rank=dp_rank,
        incarnation="first",
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_model_len=_MAX_MODEL_LEN,
    )
    return ReplicaLoop(
        core, frontend_address=address, dp_rank=dp_rank, dp_size=layout.dp_size, incarnation="first", ready=ready
    )


def _live_as_process(rank: int, folder: Path, config: Config, address: str, stop: Event) -> None:
    layout = ParallelLayout.build(config.parallel, rank=rank, world_size=config.parallel.world_size)
    _live(folder, config, address, stop, init_parallel(layout, torch.device("cpu")))


@dataclass
class Engine:
    """Real ranks under a fake frontend."""

    frontend: FakeFrontend
    driver: ChangeDriver

    num_sent: int = 0

    def send(self) -> None:
        """The next request, to the replicas in turn."""
        self.frontend.send(self.num_sent % self.frontend.dp_size, request(self.num_sent))
        self.num_sent += 1

    @property
    def is_busy(self) -> bool:
        """Whether some request has begun and not ended."""
        return len(self.frontend.ended) < len(self.frontend.outputs)

    def finish(self) -> dict[RequestId, list[int]]:
        """The output of all requests, when all have ended."""
        self.frontend.receive_until(lambda: len(self.frontend.ended) == self.num_sent)
        return self.frontend.outputs


@contextmanager
def run_engine(
    folder: Path, parallel: ParallelConfig, *, as_processes: bool = False, replays_decodes: bool = False
) -> Iterator[Engine]:
    """replays_decodes: of ranks that are threads."""
    config = _config(parallel)
    tp_size, dp_size = parallel.tensor_parallel_size, parallel.data_parallel_size
    stop: Event = multiprocessing.get_context("spawn").Event() if as_processes else threading.Event()
    with listening_frontend(dp_size) as frontend, ThreadPoolExecutor(max_workers=1) as pool:
        run: Callable[[], Any]
        if as_processes:
            args = (folder, config, frontend.address, stop)
            run = partial(run_ranks, _live_as_process, parallel.world_size, *args, timeout_s=300.0)
        else:
            life = partial(_live, folder, config, frontend.address, stop, replays_decodes=replays_decodes)
            run = partial(run_thread_ranks, life, tp_size=tp_size, dp_size=dp_size)
        ranks = pool.submit(run)
        try:
            assert frontend.router.poll(_START_TIMEOUT_MS), "no rank came"
            frontend.wait_for_ready()
            yield Engine(frontend, ChangeDriver(frontend, parallel.world_size))
        finally:
            stop.set()
            while not ranks.done():
                # An engine that sleeps has to step for the votes to be counted.
                for dp_rank in range(dp_size):
                    frontend.send(dp_rank, DropChange(change_id=0))
                if frontend.router.poll(20):
                    frontend.receive()
            ranks.result()


class OneRank:
    """What a rank alone, on which nothing migrates, answers to a request."""

    def __init__(self, folder: Path) -> None:
        config = _config(ParallelConfig())
        worker = build_worker(config, read_model_spec(folder), folder, single_rank_context(), progress=False)
        channel = open_channel(single_rank_context())
        assert not isinstance(channel, FollowerChannel)
        self._core = _new_core(config, LeaderExecutor(worker, channel), worker.num_blocks)
        self._known: dict[RequestId, list[int]] = {}

    def check(self, outputs: dict[RequestId, list[int]]) -> None:
        """Of requests made by `request`: token by token the same, or the assertion says which differs."""
        for request_id, tokens in outputs.items():
            assert tokens == self._answer(request_id), f"{request_id} has other tokens than on one rank"

    def _answer(self, request_id: RequestId) -> list[int]:
        if request_id not in self._known:
            tokens = self._known[request_id] = []
            self._core.add(request(int(request_id[1:])))
            while self._core.has_unfinished:
                for output in self._core.step():
                    tokens += output.new_token_ids
            self._core.step()  # the rank forgets the request
        return self._known[request_id]
