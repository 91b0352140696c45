"""Replayed decode steps: the same as eager ones, whoever joins, leaves or migrates, and whatever fills them up."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeserve.config import ParallelConfig, SchedulerConfig
from moeserve.engine.core import EngineCore
from moeserve.engine.messages import AddRequest
from moeserve.engine.sampling_params import SamplingParams
from moeserve.engine.scheduler import Scheduler
from moeserve.experts.load_recorder import LoadRecorder, LoadSample
from moeserve.experts.placement_tables import PlacementTables
from moeserve.ids import RequestId
from moeserve.layers.attention import KVCache
from moeserve.models.decoder import Decoder
from moeserve.models.layout import starting_placement
from moeserve.models.parameters import DictReader
from moeserve.parallel import single_rank_context
from moeserve.testing.fakes import FakeClock
from moeserve.testing.recorders import RepeatingRecorder, TapeRecorder
from moeserve.testing.tiny_models import Style, random_parameters, tiny_spec
from moeserve.worker.agreement import StepAgreement
from moeserve.worker.channel import LeaderChannel
from moeserve.worker.decode_graphs import DecodeLadder
from moeserve.worker.graph_recorder import GraphRecorder, graph_recorder_of
from moeserve.worker.input_batch import InputBatch
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.worker import LeaderExecutor, Worker
from moeserve_kernels import native
from moeserve_placement import ExpertPlacement

STYLES: list[Style] = ["qwen3", "qwen2", "deepseek", "gpt_oss"]
MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 7, 40, 4, 30
LADDER = DecodeLadder(num_tokens=(1, 2, 5, 7), max_seq_lens=(8, 17, MAX_MODEL_LEN))
"""Steps of 3, 4 and 6 requests are filled up; sequences outgrow one bound after the other."""
NUM_REQUESTS = 10

Answers = dict[RequestId, list[tuple[int, dict[int, float]]]]
"""Tokens, each with the log-probabilities of the best."""


@pytest.fixture(params=["repeated", "taped"])
def recorder(request: pytest.FixtureRequest) -> GraphRecorder:
    if request.param == "repeated":
        return RepeatingRecorder()
    if not native.is_loaded():
        pytest.skip("no native kernels: what plain torch launches depends on contents")
    return TapeRecorder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One rank with a spare place in each layer, and too few blocks for all requests: some are preempted."""

    core: EngineCore
    decoder: Decoder
    runner: ModelRunner
    placement: ExpertPlacement

    @staticmethod
    def build(style: Style, *, cache_dtype: torch.dtype = torch.float32) -> "Engine":
        spec, parallel = tiny_spec(style), single_rank_context()
        placement = starting_placement(spec, ParallelConfig())
        reader = DictReader(random_parameters(spec))
        decoder = Decoder.build(spec, reader, parallel, placement, dtype=torch.float32, num_spare_places=1)
        cache = KVCache.allocate(
            spec, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=cache_dtype, parallel=parallel
        )
        batch = InputBatch(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
        runner = ModelRunner(decoder, cache, batch, parallel=parallel)
        worker = Worker(
            decoder,
            runner,
            StepAgreement(parallel),
            placement=placement,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
        )
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=16),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(),
        )
        core = EngineCore(scheduler, LeaderExecutor(worker, LeaderChannel()), lambda: 0.0)
        return Engine(core=core, decoder=decoder, runner=runner, placement=placement)

    def capture(self, recorder: GraphRecorder) -> "Engine":
        self.runner.capture_decode(recorder, LADDER, progress=False)
        return self

    def answer(self, before_step: Callable[[int], None] = lambda step: None) -> Answers:
        """Requests that come one every other step, one after the other done; a step is an event for `before_step`."""
        answers: Answers = {}
        step = 0
        while step < 2 * NUM_REQUESTS or self.core.has_unfinished:
            if step % 2 == 0 and step < 2 * NUM_REQUESTS:
                self.core.add(request(step // 2))
            before_step(step)
            for output in self.core.step():
                assert output.error is None, output.error
                assert output.logprobs is not None
                answers.setdefault(output.request_id, []).extend(
                    (one.token_id, dict(zip(one.top_token_ids, one.top_logprobs, strict=True)))
                    for one in output.logprobs
                )
            step += 1
        return answers


def request(number: int) -> AddRequest:
    """Prompts of one token to more than a step takes; greedy and sampled ones."""
    generator = torch.Generator().manual_seed(number)
    return AddRequest(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=torch.randint(3, 90, (1 + 3 * (number % 7),), generator=generator).tolist(),
        sampling_params=SamplingParams(
            max_tokens=6 + 2 * number % 14, temperature=float(number % 2), seed=number, logprobs=3
        ),
    )


def check(answers: Answers, expected: Answers) -> None:
    assert len(expected) == NUM_REQUESTS
    assert answers.keys() == expected.keys()
    for request_id, tokens in expected.items():
        assert [token for token, _ in answers[request_id]] == [token for token, _ in tokens], request_id
        for (_, logprobs), (_, expected_logprobs) in zip(answers[request_id], tokens, strict=True):
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_answers_are_those_of_eager_steps(style: Style, recorder: GraphRecorder) -> None:
    check(Engine.build(style).capture(recorder).answer(), Engine.build(style).answer())


@pytest.mark.parametrize("style", ["qwen3", "deepseek"])
def test_answers_from_a_narrow_cache(style: Style, recorder: GraphRecorder) -> None:
    eager = Engine.build(style, cache_dtype=torch.int8)
    check(Engine.build(style, cache_dtype=torch.int8).capture(recorder).answer(), eager.answer())


def test_nothing_is_captured_after_the_start() -> None:
    recorder = RepeatingRecorder()
    engine = Engine.build("qwen3").capture(recorder)
    num_sizes = len(LADDER.num_tokens) * len(LADDER.max_seq_lens)
    assert (recorder.num_captures, recorder.num_replays) == (num_sizes, 0)
    engine.answer()
    assert recorder.num_captures == num_sizes
    assert recorder.num_replays > NUM_REQUESTS


@torch.inference_mode()
def move_an_expert(engine: Engine, step: int) -> None:
    """What a commit does: an expert of each layer lies in the spare place, and where it lay is nothing any more."""
    num_experts = engine.placement.num_logical_experts
    places_p = np.arange(num_experts)
    places_p[step % num_experts] = num_experts
    for index, layer in enumerate(engine.decoder.moe_layers):
        old, store = step % num_experts, layer.experts.store
        store.write_expert(num_experts, store.read_expert(old))
        layer.tables.take_over(
            PlacementTables.build(
                engine.placement, index, rank=0, device=torch.device("cpu"), place_of_local_p=places_p
            )
        )
        for tensor in store.experts.tensors.values():
            tensor[old] = torch.nan


def test_a_replay_sees_a_migration(recorder: GraphRecorder) -> None:
    engine = Engine.build("qwen3").capture(recorder)

    def migrate(step: int) -> None:
        if step == 17:
            move_an_expert(engine, step)

    check(engine.answer(migrate), Engine.build("qwen3").answer())


@pytest.mark.parametrize("style", ["qwen3", "deepseek"])
def test_loads_are_those_of_the_requests_tokens(style: Style, recorder: GraphRecorder) -> None:
    """What fills up a step is counted no more than captures are."""

    def loads_of(recorder: GraphRecorder | None) -> LoadSample:
        clock, samples = FakeClock(), list[LoadSample]()
        engine = Engine.build(style)
        layers = engine.decoder.moe_layers
        num_experts = engine.placement.num_logical_experts
        loads = LoadRecorder(
            num_layers=len(layers),
            num_experts=num_experts,
            device=torch.device("cpu"),
            window_s=1.0,
            on_window=samples.append,
            clock=clock,
        )
        for layer, load in zip(layers, loads.layers, strict=True):
            layer.load = load
        if recorder is not None:
            engine.capture(recorder)
        with loads.step(num_prefill_tokens=0, num_decode_tokens=0):
            engine.answer()
            clock.advance(2.0)
        with loads.step(num_prefill_tokens=0, num_decode_tokens=0):
            return samples[0]

    replayed, eager = loads_of(recorder), loads_of(None)
    assert np.array_equal(replayed.decode_load_LE, eager.decode_load_LE)
    assert np.array_equal(replayed.prefill_load_LE, eager.prefill_load_LE)
    assert eager.decode_load_LE.sum() > 0


@given(max_num_seqs=st.integers(1, 2000), max_model_len=st.integers(1, 1 << 20))
def test_the_ladder_holds_every_step_and_wastes_less_than_half_of_it(max_num_seqs: int, max_model_len: int) -> None:
    ladder = DecodeLadder.build(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    sizes, bounds = ladder.num_tokens, ladder.max_seq_lens
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))
    assert bounds[-1] == max_model_len
    assert all(8 * small <= large < 8 * (small + 1) for small, large in pairwise(bounds))
    assert bounds[0] < 8 * 2048
    assert len(sizes) * len(bounds) <= 100


def test_a_cpu_has_no_recorder() -> None:
    assert graph_recorder_of(torch.device("cpu")) is None
