"""Decides what one DP replica computes in each step: a number of tokens for each request. No I/O, no clock, no torch.

A step is `schedule()`, the model, `update()`. The token budget of a step goes

1. to running requests that decode, one token each: a long prompt never holds them up;
2. to running requests whose prompt (or history, after a preemption) is not computed yet, in chunks;
3. to waiting requests, first come, first served within a priority, while there is a seat and memory for all their
   tokens and one more block for every running request.

Why it always goes on: seats are at most the budget, so each running request gets a token; decoding requests that find
no free block take the blocks of the request that comes last in (priority, arrival), and one request alone always fits,
because others are refused at the door. So `has_unfinished` implies that the next step computes something.
"""

from bisect import insort
from collections.abc import Collection, Iterable
from operator import attrgetter

from moeserve.config import SchedulerConfig
from moeserve.engine.kv_allocator import KVAllocator
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import (
    FinishReason,
    ModelRunnerOutput,
    ReplicaStats,
    RequestOutput,
    SampledToken,
    SchedulerOutput,
)
from moeserve.engine.request import Request, RequestStatus, check_finish
from moeserve.engine.step_builder import StepBuilder
from moeserve.engine.waiting_queue import WaitingQueue
from moeserve.ids import RequestId, StepId


class Scheduler:
    """Continuous batching over a paged KV cache, with chunked prefill, prefix caching and preemption by recompute."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        enable_prefix_caching: bool = True,
    ) -> None:
        self.kv = KVAllocator(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        """In the order of (priority, arrival): the last is preempted first."""
        self._waiting = WaitingQueue()
        self._requests: dict[RequestId, Request] = {}
        self._max_batched_tokens = config.max_num_batched_tokens
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_arrived = 0
        self._num_preemptions = 0
        self._next_step_id = 0
        self._in_step: list[tuple[Request, int]] | None = None
        self._forgotten_ids: list[RequestId] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add_request(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request, or give the final answer at once for one that has nothing to run or never could."""
        assert message.request_id not in self._requests, f"request {message.request_id} is here already"
        error = self._refusal(message)
        if error is not None:
            return RequestOutput(
                request_id=message.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error=error
            )
        request = Request.create(message, arrival=self._num_arrived)
        self._num_arrived += 1
        if message.output_token_ids and (finish := check_finish(request, self._eos_token_ids)):
            return RequestOutput(
                request_id=message.request_id,
                new_token_ids=[],
                finish_reason=finish.reason,
                stop_reason=finish.stop_token_id,
            )
        self._requests[message.request_id] = request
        self._waiting.push(request)
        return None

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """End requests now, wherever they are; unknown ids are ignored. Nothing more is said about them.

        Also right between `schedule()` and `update()`: their blocks are given to nobody before the next `schedule()`.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            was_waiting = request.status is RequestStatus.WAITING
            self._finish(request)
            if was_waiting:
                self._waiting.forget(request)
            else:
                self.running.remove(request)

    def schedule(self) -> SchedulerOutput:
        """The next step. Its outcome must be given to `update()` before the step after it."""
        assert self._in_step is None, "the last step was not updated"
        step = StepBuilder(self._max_batched_tokens)
        self._schedule_decodes(step)
        self._schedule_prefills(step)
        self._admit_waiting(step)
        self._in_step = step.scheduled
        forgotten_ids, self._forgotten_ids = self._forgotten_ids, []
        output = step.build(step_id=StepId(self._next_step_id), finished_request_ids=forgotten_ids)
        self._next_step_id += 1
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Take in what the model answered to the last step; returns the news for the frontend."""
        assert result.step_id == output.step_id == self._next_step_id - 1
        assert self._in_step is not None
        in_step, self._in_step = self._in_step, None
        self._gather_prompt_logprobs(in_step, result)
        sampled = {token.request_id: token for token in result.sampled}
        news = []
        for request, num_tokens in in_step:
            if request.status is RequestStatus.FINISHED:  # aborted while the model ran
                continue
            request.num_computed_tokens += num_tokens
            self.kv.publish(request)
            if request.num_uncomputed_tokens == 0:
                news.append(self._take_token(request, sampled[request.request_id]))
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return news

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            num_running=len(self.running),
            num_waiting=len(self._waiting),
            num_blocks=self.kv.pool.num_blocks,
            num_free_blocks=self.kv.pool.num_free,
            num_preemptions=self._num_preemptions,
            num_prefix_queried_tokens=self.kv.num_prefix_queried_tokens,
            num_prefix_hit_tokens=self.kv.num_prefix_hit_tokens,
            step_id=self._next_step_id - 1,
        )

    def _refusal(self, message: AddRequest) -> str | None:
        """Why a request could never run, or None."""
        num_prompt, max_tokens = len(message.prompt_token_ids), message.sampling_params.max_tokens
        if num_prompt == 0:
            return "the prompt must hold at least 1 token, got 0"
        wants = f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together {num_prompt + max_tokens}"
        if num_prompt + max_tokens > self.max_model_len:
            return f"{wants}: more than the context of {self.max_model_len} tokens"
        if num_prompt + max_tokens > self.kv.num_slots:
            return f"{wants}: more than the KV cache of {self.kv.num_slots} tokens"
        return None

    def _schedule_decodes(self, step: StepBuilder) -> None:
        # Victims come last in `running` and this loop goes in that order: no scheduled request is ever preempted.
        for request in tuple(self.running):
            if request.status is RequestStatus.RUNNING and request.num_uncomputed_tokens == 1 and self._grow(request):
                step.add(request, 1)

    def _schedule_prefills(self, step: StepBuilder) -> None:
        for request in self.running:
            if step.budget == 0:
                return
            if request.num_uncomputed_tokens > 1:
                step.add(request, min(request.num_uncomputed_tokens, step.budget))

    def _admit_waiting(self, step: StepBuilder) -> None:
        while self._waiting and len(self.running) < self._max_running and step.budget > 0:
            request = self._waiting.first()
            # Each running request will soon want a block; taking these too would end in preemptions.
            if not self.kv.admit(request, reserve=len(self.running)):
                return
            self._waiting.pop()
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=attrgetter("order"))
            step.add(request, min(request.num_uncomputed_tokens, step.budget))

    def _grow(self, request: Request) -> bool:
        """See that a decoding request can go on; False when it had to give up its own blocks."""
        while not self.kv.grow(request):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue: all tokens are kept, their KV is computed again.

        It cannot return in the same step: for that it would need all its blocks, and one of them is taken.
        """
        self._num_preemptions += 1
        self._give_up(request)
        request.prompt_logprobs.clear()
        request.status = RequestStatus.WAITING
        self._waiting.push(request)

    def _finish(self, request: Request) -> None:
        self._give_up(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _give_up(self, request: Request) -> None:
        """Take a request's blocks, and let the ranks forget it."""
        self.kv.release(request)
        if request.num_sent_tokens > 0:
            self._forgotten_ids.append(request.request_id)
        request.num_sent_tokens = 0
        request.num_sent_blocks = 0

    def _take_token(self, request: Request, token: SampledToken) -> RequestOutput:
        request.token_ids.append(token.token_id)
        finish = check_finish(request, self._eos_token_ids)
        is_first, request.has_answered = not request.has_answered, True
        if finish is not None:
            self._finish(request)
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=[token.token_id],
            logprobs=None if token.logprobs is None else [token.logprobs],
            prompt_logprobs=request.take_prompt_logprobs(),
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_token_id,
            num_cached_tokens=(request.num_cached_tokens or 0) if is_first else 0,
        )

    def _gather_prompt_logprobs(self, in_step: list[tuple[Request, int]], result: ModelRunnerOutput) -> None:
        if not result.prompt_logprobs:
            return
        requests = {request.request_id: request for request, _ in in_step}
        for piece in result.prompt_logprobs:
            gathered = requests[piece.request_id].prompt_logprobs
            assert piece.start == len(gathered) + 1, "pieces of the prompt come in order, position 0 has none"
            gathered.extend(piece.logprobs)
