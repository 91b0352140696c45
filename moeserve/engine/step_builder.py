"""Collects one step: how many tokens of which request, and what the ranks do not know yet."""

from moeserve.engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from moeserve.engine.request import Request
from moeserve.ids import RequestId, StepId


class StepBuilder:
    """A token budget, spent on requests in the order they will run."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: list[tuple[Request, int]] = []
        self._new: list[NewRequestData] = []
        self._cached: list[CachedRequestData] = []

    def add(self, request: Request, num_tokens: int) -> None:
        """Compute the next `num_tokens` tokens of a request that has blocks for them."""
        assert 0 < num_tokens <= min(self.budget, request.num_uncomputed_tokens)
        self.budget -= num_tokens
        self.scheduled.append((request, num_tokens))
        if request.num_sent_tokens == 0:
            self._new.append(_whole(request))
        else:
            self._cached.append(_difference(request))
        request.num_sent_tokens = len(request.token_ids)
        request.num_sent_blocks = len(request.block_ids)

    def build(self, *, step_id: StepId, finished_request_ids: list[RequestId]) -> SchedulerOutput:
        return SchedulerOutput(
            step_id=step_id,
            new_requests=self._new,
            cached_requests=self._cached,
            num_scheduled_tokens={request.request_id: num_tokens for request, num_tokens in self.scheduled},
            finished_request_ids=finished_request_ids,
        )


def _whole(request: Request) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        block_ids=list(request.block_ids),
        num_computed_tokens=request.num_computed_tokens,
    )


def _difference(request: Request) -> CachedRequestData:
    return CachedRequestData(
        request_id=request.request_id,
        new_token_ids=request.token_ids[request.num_sent_tokens :],
        new_block_ids=request.block_ids[request.num_sent_blocks :],
        num_computed_tokens=request.num_computed_tokens,
    )
