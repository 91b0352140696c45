"""Fakes for tests of the engine and the server: a clock, an executor without a model, and the agreement of replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError

from moeserve.engine.outputs import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    SampledToken,
    SchedulerOutput,
)
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId, DpRank, RequestId
from moeserve.testing.fake_model import NextToken, PagedFakeModel, fake_logprobs, hashed_token


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.now += seconds


class PeerEndedError(Exception):
    """A replica cannot step any more because a peer is gone."""


class FakeAgreement:
    """The agreement of the replicas of an engine, each in a thread of this process.

    A replica that waits longer than `timeout_s` for its peers raises TimeoutError, and so do they.
    """

    def __init__(self, dp_size: int, *, timeout_s: float = 30.0) -> None:
        self._num_tokens = [0] * dp_size
        self._barrier = Barrier(dp_size, timeout=timeout_s)
        self._peer_has_ended = False

    def total(self, dp_rank: DpRank, num_tokens: int) -> int:
        """Tokens of all replicas in this step; blocks until all have come."""
        self._num_tokens[dp_rank] = num_tokens
        self._wait()
        total = sum(self._num_tokens)
        self._wait()  # nobody writes the next step's number before all have read this one's
        return total

    def end(self) -> None:
        """A replica is gone: whoever waits for it, now or later, raises PeerEndedError."""
        self._peer_has_ended = True
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except BrokenBarrierError as error:
            if self._peer_has_ended:
                raise PeerEndedError from error
            raise TimeoutError("a replica waited in vain for its peers") from error


@dataclass(slots=True, kw_only=True)
class _RankRequest:
    """What a rank knows of a request."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_table: list[BlockId]


class FakeExecutor:
    """A `StepExecutor` that keeps the books of a rank and computes a `PagedFakeModel`.

    It checks what real ranks rely on: requests come whole once and then as differences, and are known when scheduled.
    `on_step` is called in every step before anything is computed: a test may look, wait or advance a clock there.
    `agree` turns the token count of this replica into that of the engine (`FakeAgreement.total`).
    """

    def __init__(
        self,
        *,
        block_size: int,
        next_token: NextToken | None = None,
        agree: Callable[[int], int] | None = None,
        on_step: Callable[[SchedulerOutput], None] | None = None,
    ) -> None:
        self._model = PagedFakeModel(block_size=block_size)
        self._next_token = next_token or hashed_token(4096)
        self._agree = agree
        self._on_step = on_step
        self._requests: dict[RequestId, _RankRequest] = {}
        self.committed_changes: list[int] = []
        """Changes of the expert placement, as they were asked for."""
        self.dropped_changes: list[int] = []

    @property
    def block_tables(self) -> dict[RequestId, list[BlockId]]:
        """Of the requests this rank knows."""
        return {request_id: list(request.block_table) for request_id, request in self._requests.items()}

    def commit_change(self, change_id: int) -> None:
        self.committed_changes.append(change_id)

    def drop_change(self, change_id: int) -> None:
        self.dropped_changes.append(change_id)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self._on_step is not None:
            self._on_step(output)
        total = output.total_num_scheduled_tokens
        if self._agree is not None:
            total = self._agree(total)
        computed = self._apply_changes(output)
        result = ModelRunnerOutput(step_id=output.step_id, engine_is_idle=total == 0)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._run(request_id, range(computed[request_id], computed[request_id] + num_tokens), result)
        return result

    def _apply_changes(self, output: SchedulerOutput) -> dict[RequestId, int]:
        """Bring the books up to date; returns the computed tokens of each scheduled request."""
        for request_id in output.finished_request_ids:
            del self._requests[request_id]
        for new in output.new_requests:
            self._add(new)
        for cached in output.cached_requests:
            request = self._requests[cached.request_id]
            request.token_ids += cached.new_token_ids
            request.block_table += cached.new_block_ids
        changes: list[NewRequestData | CachedRequestData] = [*output.new_requests, *output.cached_requests]
        computed = {change.request_id: change.num_computed_tokens for change in changes}
        assert computed.keys() == output.num_scheduled_tokens.keys()
        return computed

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self._requests, f"request {new.request_id} came whole twice"
        self._requests[new.request_id] = _RankRequest(
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            sampling_params=new.sampling_params,
            block_table=list(new.block_ids),
        )

    def _run(self, request_id: RequestId, positions: range, result: ModelRunnerOutput) -> None:
        request = self._requests[request_id]
        params = request.sampling_params
        assert positions.stop <= len(request.token_ids)
        kv = self._model.compute(request.token_ids, request.block_table, positions)
        if params.prompt_logprobs is not None:
            # The logits at a position are about the token behind it.
            told = range(positions.start + 1, min(positions.stop + 1, request.num_prompt_tokens))
            if told:
                logprobs = [fake_logprobs(request.token_ids[i], params.prompt_logprobs) for i in told]
                result.prompt_logprobs.append(
                    PromptLogprobs(request_id=request_id, start=told.start, logprobs=logprobs)
                )
        if positions.stop == len(request.token_ids):
            token_id = self._next_token(kv, request.token_ids, request.num_prompt_tokens)
            logprobs_of_it = None if params.logprobs is None else fake_logprobs(token_id, params.logprobs)
            result.sampled.append(SampledToken(request_id=request_id, token_id=token_id, logprobs=logprobs_of_it))
