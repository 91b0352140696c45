"""Scheduler, allocator and pool under random operations, around a fake model whose output shows every wrong block.

Whatever happens - chunking, prefix hits, preemption, aborts in the middle of a step, resumed requests - each request's
tokens are those of the model run alone, every request ends, and every block comes back.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moeserve.config import SchedulerConfig
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import FinishReason, RequestOutput, SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import BlockId, RequestId
from moeserve.testing.fake_model import generate, hashed_token
from moeserve.testing.fakes import FakeExecutor

VOCAB_SIZE = 7
EOS = 0
NEXT_TOKEN = hashed_token(VOCAB_SIZE)
MAX_STEPS_TO_DRAIN = 2000

ALPHABET = st.integers(1, 2)
"""Few tokens in prompts, so that prefixes are shared."""
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(ALPHABET, min_size=1, max_size=14),
        "max_tokens": st.integers(1, 10),
        "min_tokens": st.integers(0, 10),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=1),
        "wants_prompt_logprobs": st.booleans(),
        "salt": st.sampled_from(["", "", "tenant"]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "num_resumed": st.integers(0, 4),
    }
)
ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 12),
        "block_size": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(1, 12),
        "max_num_seqs": st.integers(1, 5),
        "enable_prefix_caching": st.booleans(),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(engine=ENGINES)
    def start(self, engine: dict) -> None:
        self.engine = engine
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=engine["max_num_seqs"], max_num_batched_tokens=engine["max_num_batched_tokens"]
            ),
            num_blocks=engine["num_blocks"],
            block_size=engine["block_size"],
            max_model_len=1000,
            eos_token_ids=[EOS],
            enable_prefix_caching=engine["enable_prefix_caching"],
        )
        self.executor = FakeExecutor(
            block_size=engine["block_size"], next_token=NEXT_TOKEN, on_step=self.check_step_and_abort
        )
        self.expected: dict[RequestId, tuple[list[int], FinishReason]] = {}
        self.prompt_logprobs: dict[RequestId, list[int]] = {}
        self.received: dict[RequestId, list[int]] = {}
        self.aborts_in_step: list[RequestId] = []
        self.num_added = 0

    @rule(wish=REQUESTS)
    def add(self, wish: dict) -> None:
        request_id = RequestId(f"request-{self.num_added}")
        self.num_added += 1
        params = SamplingParams(
            max_tokens=wish["max_tokens"],
            min_tokens=min(wish["min_tokens"], wish["max_tokens"]),
            ignore_eos=wish["ignore_eos"],
            stop_token_ids=tuple(wish["stop_token_ids"]),
            prompt_logprobs=1 if wish["wants_prompt_logprobs"] else None,
            seed=0,
        )
        output, reason = generate(wish["prompt"], params, NEXT_TOKEN, eos_token_ids=[EOS])
        num_resumed = min(wish["num_resumed"], len(output) - 1)
        message = AddRequest(
            request_id=request_id,
            prompt_token_ids=wish["prompt"],
            sampling_params=params,
            output_token_ids=output[:num_resumed],
            cache_salt=wish["salt"],
            priority=wish["priority"],
        )
        answer = self.scheduler.add_request(message)
        if len(wish["prompt"]) + params.max_tokens > self.engine["num_blocks"] * self.engine["block_size"]:
            assert answer is not None
            assert answer.finish_reason is FinishReason.ERROR
            assert answer.error
            return
        assert answer is None
        self.expected[request_id] = (output[num_resumed:], reason)
        self.received[request_id] = []
        if wish["wants_prompt_logprobs"] and num_resumed == 0:
            self.prompt_logprobs[request_id] = wish["prompt"][1:]

    @rule()
    def step(self) -> None:
        output = self.scheduler.schedule()
        total = output.total_num_scheduled_tokens
        assert (total > 0) == bool(self.expected), "whoever has requests computes something"
        assert total <= self.engine["max_num_batched_tokens"]
        assert len(self.scheduler.running) <= self.engine["max_num_seqs"]
        result = self.executor.execute(output)
        for news in self.scheduler.update(output, result):
            self.receive(news)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        for request_id in self.draw_victims(data):
            self.scheduler.abort([request_id, RequestId("unknown")])
            self.forget(request_id)

    @rule(data=st.data())
    def abort_while_the_model_runs(self, data: st.DataObject) -> None:
        self.aborts_in_step = self.draw_victims(data)
        self.step()

    def draw_victims(self, data: st.DataObject) -> list[RequestId]:
        if not self.expected:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(self.expected)), max_size=2, unique=True))

    def check_step_and_abort(self, output: SchedulerOutput) -> None:
        """Between `schedule()` and `update()`: every block that is written belongs to its writer alone."""
        block_size = self.engine["block_size"]
        for request in self.scheduler.running:
            count = output.num_scheduled_tokens.get(request.request_id, 0)
            written = range(request.num_computed_tokens, request.num_computed_tokens + count)
            for index in {position // block_size for position in written}:
                assert self.scheduler.kv.pool.ref_count(request.block_ids[index]) == 1
        self.scheduler.abort(self.aborts_in_step)
        for request_id in self.aborts_in_step:
            self.forget(request_id)
        self.aborts_in_step = []

    def receive(self, news: RequestOutput) -> None:
        request_id = news.request_id
        is_first = not self.received[request_id]
        self.received[request_id] += news.new_token_ids
        if is_first and request_id in self.prompt_logprobs:
            assert news.prompt_logprobs is not None
            assert [entry.token_id for entry in news.prompt_logprobs] == self.prompt_logprobs[request_id]
        else:
            assert news.prompt_logprobs is None
        expected, reason = self.expected[request_id]
        assert self.received[request_id] == expected[: len(self.received[request_id])]
        assert (news.finish_reason is not None) == (len(self.received[request_id]) == len(expected))
        if news.finish_reason is not None:
            assert news.finish_reason is reason
            self.forget(request_id)

    def forget(self, request_id: RequestId) -> None:
        del self.expected[request_id], self.received[request_id]

    @invariant()
    def reference_counts_equal_table_entries(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler.kv.pool
        entries = Counter(block_id for request in self.scheduler.running for block_id in request.block_ids)
        counts = {BlockId(i): pool.ref_count(BlockId(i)) for i in range(pool.num_blocks)}
        assert counts == {block_id: entries[block_id] for block_id in counts}
        assert pool.num_free == sum(count == 0 for count in counts.values())

    @invariant()
    def no_request_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.expected)
        assert self.scheduler.has_unfinished == bool(self.expected)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert self.expected == {}, "every queued request runs to its end"
        assert self.scheduler.kv.pool.num_free == self.engine["num_blocks"]
        self.step()
        assert self.executor.block_tables == {}, "the ranks have forgotten everything"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
