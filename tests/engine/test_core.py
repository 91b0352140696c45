"""The engine core around a scheduler: time, early answers, and agreement with the executor."""

import pytest

from moeserve.config import SchedulerConfig
from moeserve.engine.core import EngineCore, StepExecutor
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import FinishReason, ModelRunnerOutput, SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import RequestId
from moeserve.testing.fakes import FakeClock, FakeExecutor


def build_core(executor: StepExecutor, clock: FakeClock | None = None) -> EngineCore:
    scheduler = Scheduler(SchedulerConfig(), num_blocks=4, block_size=4, max_model_len=100, eos_token_ids=[])
    return EngineCore(scheduler, executor, clock or FakeClock())


def request(name: str, num_prompt_tokens: int) -> AddRequest:
    return AddRequest(
        request_id=RequestId(name),
        prompt_token_ids=[1] * num_prompt_tokens,
        sampling_params=SamplingParams(max_tokens=2),
    )


def test_a_step_runs_in_the_time_of_the_clock_it_was_given() -> None:
    clock = FakeClock(now=100.0)
    core = build_core(FakeExecutor(block_size=4, on_step=lambda _: clock.advance(0.25)), clock)
    core.add(request("any", 3))
    core.step()
    assert core.last_step_s == 0.25


def test_an_early_answer_comes_with_the_next_step_before_its_news() -> None:
    core = build_core(FakeExecutor(block_size=4))
    core.add(request("fits", 3))
    core.add(request("too large", 99))
    assert [(news.request_id, news.finish_reason) for news in core.step()] == [
        ("too large", FinishReason.ERROR),
        ("fits", None),
    ]


def test_an_early_answer_alone_is_unfinished_work_until_it_is_given() -> None:
    core = build_core(FakeExecutor(block_size=4))
    core.add(request("too large", 99))
    assert core.has_unfinished
    assert [news.request_id for news in core.step()] == ["too large"]
    assert core.engine_is_idle
    assert not core.has_unfinished


def test_an_executor_that_sleeps_over_its_tokens_is_found_out() -> None:
    class SleepyExecutor:
        def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
            return ModelRunnerOutput(step_id=output.step_id, engine_is_idle=True)

    core = build_core(SleepyExecutor())
    core.add(request("any", 1))
    with pytest.raises(AssertionError, match="an engine with tokens is not idle"):
        core.step()
