"""The scheduler's promises one by one: order, chunks, prefix hits, preemption, ends, refusals."""

from collections.abc import Callable

import pytest

from moeserve.config import SchedulerConfig
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import FinishReason, RequestOutput, SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import RequestId
from moeserve.testing.fake_model import NextToken, hashed_token
from moeserve.testing.fakes import FakeExecutor

EOS = 9


class Engine:
    """A scheduler and a fake executor; remembers every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 200,
        next_token: NextToken | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            eos_token_ids=[EOS],
        )
        self.executor = FakeExecutor(block_size=block_size, next_token=next_token or hashed_token(EOS))
        self.steps: list[SchedulerOutput] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        priority: int = 0,
        salt: str = "",
        output: list[int] | None = None,
        **params,
    ) -> RequestOutput | None:
        return self.scheduler.add_request(
            AddRequest(
                request_id=RequestId(name),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(**{"max_tokens": 4, **params}),
                output_token_ids=output or [],
                cache_salt=salt,
                priority=priority,
            )
        )

    def step(self) -> list[RequestOutput]:
        output = self.scheduler.schedule()
        self.steps.append(output)
        return self.scheduler.update(output, self.executor.execute(output))

    def run(self) -> dict[str, list[RequestOutput]]:
        """Step to the end; the news of each request."""
        news: dict[str, list[RequestOutput]] = {}
        while self.scheduler.has_unfinished:
            for item in self.step():
                news.setdefault(item.request_id, []).append(item)
        return news

    def counts(self) -> list[dict[str, int]]:
        return [dict(step.num_scheduled_tokens) for step in self.steps]


def scripted(*tokens: int) -> NextToken:
    """The same output for every request."""
    return lambda kv, token_ids, num_prompt_tokens: tokens[len(token_ids) - num_prompt_tokens]


def test_a_long_prompt_comes_in_chunks_behind_decodes_and_before_waiting_requests() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("decoding", [1, 2], max_tokens=5)
    engine.step()
    engine.add("long", [3] * 17)
    engine.add("late", [4, 5])
    for _ in range(4):
        engine.step()
    assert engine.counts() == [
        {"decoding": 2},
        {"decoding": 1, "long": 7},
        {"decoding": 1, "long": 7},
        {"decoding": 1, "long": 3, "late": 2},
        {"decoding": 1, "long": 1, "late": 1},
    ]


def test_with_fewer_tokens_than_seats_every_running_request_still_gets_one() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=3)
    for name in "abcd":
        engine.add(name, [1], max_tokens=3, min_tokens=3)
    engine.run()
    assert engine.counts() == [{"a": 1, "b": 1, "c": 1}] * 3 + [{"d": 1}] * 3


def test_lower_priority_values_run_first_and_equals_in_order_of_arrival() -> None:
    engine = Engine(max_num_seqs=1)
    for name, priority in [("third", 1), ("first", -1), ("fourth", 1), ("second", 0)]:
        engine.add(name, [1], priority=priority, max_tokens=1)
    engine.run()
    assert [list(count) for count in engine.counts()] == [["first"], ["second"], ["third"], ["fourth"]]


def test_a_cached_prompt_computes_only_its_last_block_again() -> None:
    engine = Engine()
    prompt = list(range(8))
    engine.add("first", prompt)
    first = engine.run()["first"]
    engine.add("second", prompt)
    second = engine.run()["second"]
    whole = [step.new_requests[0] for step in engine.steps if step.new_requests]
    assert [new.num_computed_tokens for new in whole] == [0, 4], "a full hit must leave the last token to compute"
    assert [item.new_token_ids for item in first] == [item.new_token_ids for item in second]
    assert [item.num_cached_tokens for item in second] == [4] + [0] * (len(second) - 1)
    stats = engine.scheduler.stats()
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (16, 4)


def test_running_requests_share_the_blocks_of_a_prefix() -> None:
    engine = Engine(num_blocks=8)
    engine.add("first", list(range(9)), max_tokens=8, ignore_eos=True)
    engine.step()
    engine.add("second", list(range(9)), max_tokens=8, ignore_eos=True)
    engine.step()
    tables = engine.executor.block_tables
    assert tables[RequestId("first")][:2] == tables[RequestId("second")][:2]
    assert tables[RequestId("first")][2] != tables[RequestId("second")][2]
    assert engine.scheduler.stats().num_free_blocks == 4


@pytest.mark.parametrize(
    "second",
    [{"salt": "other tenant"}, {"prompt_logprobs": 0}, {"prompt": [7, *range(1, 9)]}],
    ids=["another salt", "prompt logprobs need every token", "another first token"],
)
def test_what_must_not_hit_the_cache(second: dict) -> None:
    engine = Engine()
    engine.add("first", list(range(9)))
    engine.run()
    engine.add("second", **{"prompt": list(range(9)), **second})
    assert engine.run()["second"][0].num_cached_tokens == 0


def test_the_last_in_order_is_preempted_and_is_the_next_to_come_back() -> None:
    engine = Engine(num_blocks=6, max_num_batched_tokens=32)
    engine.add("first", [1] * 8, max_tokens=16, ignore_eos=True)
    engine.add("second", [2] * 7, max_tokens=16, ignore_eos=True)
    for _ in range(5):
        engine.step()
    engine.add("third", [3], max_tokens=1)
    news = engine.run()
    assert engine.scheduler.stats().num_preemptions == 1
    preempting = next(step for step in engine.steps if step.finished_request_ids == ["second"])
    assert list(preempting.num_scheduled_tokens) == ["first"]
    whole = [new for step in engine.steps for new in step.new_requests]
    assert [new.request_id for new in whole] == ["first", "second", "second", "third"]
    assert whole[2].token_ids[:7] == [2] * 7
    assert len(whole[2].token_ids) > 7, "a preempted request keeps its output"
    assert {name: items[-1].finish_reason for name, items in news.items()} == dict.fromkeys(
        ["first", "second", "third"], FinishReason.LENGTH
    )


def test_prompt_logprobs_are_whole_after_a_preemption_in_the_middle_of_the_prompt() -> None:
    engine = Engine(num_blocks=6, max_num_batched_tokens=2)
    engine.add("first", [1] * 4, max_tokens=12, ignore_eos=True)
    engine.step()
    engine.step()
    prompt = [2] * 11  # one token a step; "first" wants the last free block, and then one more
    engine.add("second", prompt, prompt_logprobs=0, max_tokens=1)
    news = engine.run()
    assert engine.scheduler.stats().num_preemptions == 1
    assert news["second"][0].prompt_logprobs is not None
    assert [entry.token_id for entry in news["second"][0].prompt_logprobs] == prompt[1:]


def test_a_request_is_not_admitted_into_the_next_blocks_of_running_ones() -> None:
    engine = Engine(num_blocks=4)
    engine.add("first", [1] * 4, max_tokens=8, ignore_eos=True)
    engine.step()
    engine.add("second", [2] * 8, max_tokens=6, ignore_eos=True)  # two blocks are free, and "first" will want one
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0


def test_nobody_waits_behind_an_aborted_head_of_the_queue() -> None:
    engine = Engine(max_num_seqs=1)
    for name in ["running", "head", "behind"]:
        engine.add(name, [1], max_tokens=2, ignore_eos=True)
    engine.step()
    engine.scheduler.abort([RequestId("head")])
    assert engine.scheduler.stats().num_waiting == 1
    assert set(engine.run()) == {"running", "behind"}


def test_an_aborted_id_can_come_again_at_once() -> None:
    engine = Engine()
    engine.add("same", [1, 2, 3])
    output = engine.scheduler.schedule()
    result = engine.executor.execute(output)
    engine.scheduler.abort([RequestId("same")])
    engine.add("same", [4, 5])
    assert engine.scheduler.update(output, result) == []
    assert engine.scheduler.stats().num_free_blocks == 64
    engine.step()
    assert engine.steps[-1].finished_request_ids == ["same"]
    assert [new.token_ids for new in engine.steps[-1].new_requests] == [[4, 5]]


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason", "stop_reason"),
    [
        ({}, 2, FinishReason.STOP, None),
        ({"ignore_eos": True}, 6, FinishReason.LENGTH, None),
        ({"stop_token_ids": (5,)}, 1, FinishReason.STOP, 5),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, 2, FinishReason.STOP, 9),
        ({"min_tokens": 2}, 2, FinishReason.STOP, None),
        ({"min_tokens": 3}, 4, FinishReason.STOP, None),
        ({"min_tokens": 3, "stop_token_ids": (7,)}, 3, FinishReason.STOP, 7),
        ({"max_tokens": 1}, 1, FinishReason.LENGTH, None),
        ({"max_tokens": 2}, 2, FinishReason.STOP, None),
    ],
)
def test_how_a_request_ends(params: dict, num_tokens: int, reason: FinishReason, stop_reason: int | None) -> None:
    engine = Engine(next_token=scripted(5, EOS, 7, EOS, 6, 6))
    engine.add("request", [1], **{"max_tokens": 6, **params})
    news = engine.run()["request"]
    assert len(news) == num_tokens
    assert [item.finish_reason for item in news] == [None] * (num_tokens - 1) + [reason]
    assert news[-1].stop_reason == stop_reason


@pytest.mark.parametrize(
    ("add", "error"),
    [
        (lambda e: e.add("r", []), "the prompt must hold at least 1 token, got 0"),
        (
            lambda e: e.add("r", [1] * 18, max_tokens=3),
            "the prompt has 18 tokens and max_tokens is 3, together 21: more than the context of 20 tokens",
        ),
        (
            lambda e: e.add("r", [1] * 14, max_tokens=3),
            "the prompt has 14 tokens and max_tokens is 3, together 17: more than the KV cache of 16 tokens",
        ),
    ],
    ids=["empty", "longer than the context", "larger than the KV cache"],
)
def test_what_can_never_run_is_answered_at_once(add: Callable[[Engine], RequestOutput | None], error: str) -> None:
    engine = Engine(num_blocks=4, max_model_len=20)
    assert add(engine) == RequestOutput(
        request_id=RequestId("r"), new_token_ids=[], finish_reason=FinishReason.ERROR, error=error
    )
    assert not engine.scheduler.has_unfinished


def test_the_largest_request_runs() -> None:
    engine = Engine(num_blocks=4)
    engine.add("request", [1] * 12, max_tokens=4, ignore_eos=True)
    assert len(engine.run()["request"]) == 4


def test_a_resumed_request_goes_on_behind_its_output() -> None:
    engine = Engine()
    engine.add("whole", [1, 2], max_tokens=6, ignore_eos=True)
    whole = [item.new_token_ids[0] for item in engine.run()["whole"]]
    engine.add("resumed", [1, 2], output=whole[:4], max_tokens=6, ignore_eos=True)
    resumed = engine.run()["resumed"]
    assert [item.new_token_ids[0] for item in resumed] == whole[4:]
    assert resumed[0].num_cached_tokens == 2, "only tokens of the prompt count"


@pytest.mark.parametrize(
    ("output", "reason"), [([1, EOS], FinishReason.STOP), ([1] * 4, FinishReason.LENGTH)], ids=["eos", "max_tokens"]
)
def test_a_resumed_request_that_had_ended_ends(output: list[int], reason: FinishReason) -> None:
    answer = Engine().add("resumed", [1], output=output, max_tokens=4)
    assert answer is not None
    assert (answer.new_token_ids, answer.finish_reason) == ([], reason)


def test_logprobs_pass_through_and_those_of_the_prompt_come_whole_with_the_first_output() -> None:
    engine = Engine(max_num_batched_tokens=4)
    prompt = list(range(1, 8))
    engine.add("request", prompt, logprobs=2, prompt_logprobs=1, max_tokens=2, ignore_eos=True)
    first, second = engine.run()["request"]
    assert first.prompt_logprobs is not None
    assert [entry.token_id for entry in first.prompt_logprobs] == prompt[1:]
    assert second.prompt_logprobs is None
    for item in (first, second):
        assert item.logprobs is not None
        assert [entry.token_id for entry in item.logprobs] == item.new_token_ids


def test_a_step_without_work_is_empty_and_still_tells_the_ranks_what_to_forget() -> None:
    engine = Engine()
    engine.add("request", [1], max_tokens=1)
    engine.run()
    engine.step()
    assert engine.counts()[-1] == {}
    assert engine.steps[-1].finished_request_ids == ["request"]
    assert [step.step_id for step in engine.steps] == [0, 1]


def test_two_requests_of_one_id_are_a_programmers_error() -> None:
    engine = Engine()
    engine.add("same", [1])
    with pytest.raises(AssertionError, match="same is here already"):
        engine.add("same", [1])
