"""Engines of several ranks give the tokens of one rank: every request, greedy or sampled, whoever works or idles."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.config import Config, ParallelConfig, config_from_dict
from moeserve.engine.core import EngineCore
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import SchedulerOutput, TokenLogprobs
from moeserve.engine.sampling_params import SamplingParams
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import RequestId, StepId
from moeserve.models.hf_config import read_model_spec
from moeserve.parallel import ParallelContext, ParallelLayout, init_parallel, single_rank_context
from moeserve.testing.checkpoints import write_tiny_checkpoint
from moeserve.testing.multiprocess import run_ranks
from moeserve.testing.recorders import RepeatingRecorder
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.worker.channel import FollowerChannel, LeaderChannel, open_channel
from moeserve.worker.device import load_native_kernels
from moeserve.worker.graph_recorder import GraphRecorder
from moeserve.worker.worker import EngineStopped, FollowerLoop, LeaderExecutor, build_worker

pytestmark = pytest.mark.distributed

NUM_REQUESTS = 9
LAST_ARRIVAL = 30

Answers = dict[RequestId, tuple[list[int], list[TokenLogprobs]]]
"""Output tokens and prompt log-probabilities of each request."""


def requests() -> list[tuple[int, AddRequest]]:
    """(step of arrival, request). Prompts of 1 to 33 tokens; arrivals with gaps in which nobody has work."""
    generator = torch.Generator().manual_seed(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.1, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    ]
    return [
        (
            (0, 0, LAST_ARRIVAL)[i % 3],
            AddRequest(
                request_id=RequestId(f"r{i}"),
                prompt_token_ids=torch.randint(3, 300, (1 + 4 * i,), generator=generator).tolist(),
                sampling_params=SamplingParams(max_tokens=4 + i, seed=i, ignore_eos=True, **kinds[i % len(kinds)]),
            ),
        )
        for i in range(NUM_REQUESTS)
    ]


def replica_of(number: int, dp_size: int) -> int:
    """The last replica gets nothing but the late requests, so that half of the time it only takes part."""
    return dp_size - 1 if number % 3 == 2 else number % max(1, dp_size - 1)


def serve(
    folder: Path,
    parallel_config: ParallelConfig,
    parallel: ParallelContext,
    recorder: GraphRecorder | None = None,
) -> Answers:
    """Life of one rank; leaders return the answers of their replica, followers none."""
    layout = parallel.layout
    spec = read_model_spec(folder)
    config = replace(
        config_from_dict(
            {
                "model": {"max_model_len": 64},
                "cache": {"block_size": 4, "kv_cache_memory": 20 * 1024},
                "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
            }
        ),
        parallel=parallel_config,
    )
    worker = build_worker(config, spec, folder, parallel, progress=False)
    worker.capture_decode(recorder, progress=False)
    channel = open_channel(parallel)
    if isinstance(channel, FollowerChannel):
        FollowerLoop(worker, channel).run()
        return {}
    executor = LeaderExecutor(worker, channel)
    core = EngineCore(new_scheduler(config, worker.num_blocks, spec.eos_token_ids), executor, lambda: 0.0)
    answers: Answers = {}
    step = 0
    while step <= LAST_ARRIVAL or not core.engine_is_idle:
        for number, (arrival, request) in enumerate(requests()):
            if arrival == step and replica_of(number, layout.dp_size) == layout.dp_rank:
                core.add(request)
        for output in core.step():
            tokens, _ = answers.setdefault(output.request_id, ([], output.prompt_logprobs or []))
            tokens.extend(output.new_token_ids)
        step += 1
    assert not core.has_unfinished
    assert core.stats().num_free_blocks == worker.num_blocks
    executor.close()
    return answers


def new_scheduler(config: Config, num_blocks: int, eos_token_ids: tuple[int, ...]) -> Scheduler:
    return Scheduler(
        config.scheduler, num_blocks=num_blocks, block_size=4, max_model_len=64, eos_token_ids=eos_token_ids
    )


def check(answers_by_rank: list[Answers], expected: Answers, *, tp_size: int) -> None:
    together: Answers = {}
    for rank, answers in enumerate(answers_by_rank):
        assert not (rank % tp_size and answers), "a follower answered"
        assert not (together.keys() & answers.keys())
        together |= answers
    assert {r: tokens for r, (tokens, _) in together.items()} == {r: tokens for r, (tokens, _) in expected.items()}
    for request_id, (_, prompt_logprobs) in together.items():
        expected_logprobs = expected[request_id][1]
        assert [(p.token_id, p.rank) for p in prompt_logprobs] == [(p.token_id, p.rank) for p in expected_logprobs]
        assert [p.logprob for p in prompt_logprobs] == pytest.approx([p.logprob for p in expected_logprobs], abs=1e-4)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    answers = serve(checkpoint, ParallelConfig(), single_rank_context())
    assert [len(answers[request.request_id][0]) for _, request in requests()] == [4 + i for i in range(NUM_REQUESTS)]
    return answers


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "num_redundant_experts"),
    [
        pytest.param(2, 1, 0, id="tp2"),
        pytest.param(1, 2, 0, id="dp2"),
        pytest.param(2, 2, 0, id="tp2 x dp2"),
        pytest.param(1, 3, 0, id="dp3: experts do not divide"),
        pytest.param(4, 1, 0, id="tp4: fewer KV heads than ranks"),
        pytest.param(2, 2, 5, id="tp2 x dp2 with redundant experts"),
    ],
)
def test_threads_as_ranks(
    checkpoint: Path, expected: Answers, tp_size: int, dp_size: int, num_redundant_experts: int
) -> None:
    config = ParallelConfig(
        tensor_parallel_size=tp_size, data_parallel_size=dp_size, num_redundant_experts=num_redundant_experts
    )
    answers = run_thread_ranks(partial(serve, checkpoint, config), tp_size=tp_size, dp_size=dp_size)
    check(answers, expected, tp_size=tp_size)


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "num_redundant_experts"),
    [
        pytest.param(2, 1, 0, id="tp2"),
        pytest.param(1, 2, 0, id="dp2"),
        pytest.param(2, 2, 5, id="tp2 x dp2 with redundant experts"),
    ],
)
def test_replayed_decodes(
    checkpoint: Path, expected: Answers, tp_size: int, dp_size: int, num_redundant_experts: int
) -> None:
    """All ranks replay the same steps, also those whose replica has fewer requests than another, or none."""
    config = ParallelConfig(
        tensor_parallel_size=tp_size, data_parallel_size=dp_size, num_redundant_experts=num_redundant_experts
    )
    recorders = [RepeatingRecorder() for _ in range(tp_size * dp_size)]

    def run(parallel: ParallelContext) -> Answers:
        return serve(checkpoint, config, parallel, recorders[parallel.layout.rank])

    check(run_thread_ranks(run, tp_size=tp_size, dp_size=dp_size), expected, tp_size=tp_size)
    assert recorders[0].num_replays > LAST_ARRIVAL / 2
    assert all(recorder.num_replays == recorders[0].num_replays for recorder in recorders)


def serve_as_process(rank: int, folder: Path, config: ParallelConfig) -> Answers:
    load_native_kernels(torch.device("cpu"))  # as a server does: with them come collectives over shared memory
    layout = ParallelLayout.build(config, rank=rank, world_size=config.world_size)
    return serve(folder, config, init_parallel(layout, torch.device("cpu")))


@pytest.mark.parametrize("checkpoint", ["qwen3_moe"], indirect=True)
def test_processes_as_ranks(checkpoint: Path, expected: Answers) -> None:
    config = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    check(run_ranks(serve_as_process, 4, checkpoint, config, timeout_s=120.0), expected, tp_size=2)


@pytest.mark.parametrize("checkpoint", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize(("tp_size", "dp_size"), [(2, 1), (2, 2)])
def test_one_vote_stops_all_ranks(checkpoint: Path, tp_size: int, dp_size: int) -> None:
    config = config_from_dict({"cache": {"kv_cache_memory": 2**20}, "model": {"max_model_len": 16}})
    config = replace(config, parallel=ParallelConfig(tensor_parallel_size=tp_size, data_parallel_size=dp_size))
    spec = read_model_spec(checkpoint)

    def live(parallel: ParallelContext) -> str:
        worker = build_worker(config, spec, checkpoint, parallel, progress=False)
        channel = open_channel(parallel)
        if not isinstance(channel, LeaderChannel):
            FollowerLoop(worker, channel).run()
            return "follower stopped"
        executor = LeaderExecutor(worker, channel)
        output = SchedulerOutput(step_id=StepId(0))
        assert executor.execute(output).engine_is_idle
        if parallel.layout.dp_rank == 0:
            executor.vote_stop()
        with pytest.raises(EngineStopped):
            executor.execute(output)
        channel.close()  # nobody listens any more, and nobody waits
        return "leader stopped"

    results = run_thread_ranks(live, tp_size=tp_size, dp_size=dp_size)
    assert results == ["leader stopped", "follower stopped"] * dp_size
