"""The values of one step: what the scheduler decided, and what the model answered.

`SchedulerOutput` goes from a DP replica's scheduler to all its TP ranks (new requests whole, known requests as
differences); `ModelRunnerOutput` comes back from the leader (tp_rank 0). Both are plain values without torch and are
encoded by msgspec as they are.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId, RequestId, StepId


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request the ranks do not know (yet, or any more: preemption makes the ranks forget it)."""

    request_id: RequestId
    token_ids: list[int]
    """Prompt and, for a resumed request, the output so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[BlockId]
    num_computed_tokens: int
    """Leading tokens whose KV is already in `block_ids` (prefix cache)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRequestData:
    """What changed since the last step for a request the ranks know."""

    request_id: RequestId
    new_token_ids: list[int]
    """Tokens sampled since the last time this request was scheduled; appended to the ranks' token list."""
    new_block_ids: list[BlockId]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step of one DP replica: a number of tokens for each request.

    Requests run in the order of `num_scheduled_tokens`. A request is sampled in this step if and only if its scheduled
    tokens reach the last token known.
    """

    step_id: StepId
    new_requests: list[NewRequestData] = field(default_factory=list)
    cached_requests: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[RequestId, int] = field(default_factory=dict)
    finished_request_ids: list[RequestId] = field(default_factory=list)
    """Finished, aborted or preempted since the last step: the ranks forget them before they read the rest."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm, of the model's own distribution.

    "Own" means before temperature, penalties, bias and truncation.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_token_ids: list[int]
    top_logprobs: list[float]
    """Most likely first, as many as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens at positions start, start + 1, ... (position 0 has none)."""

    request_id: RequestId
    start: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    step_id: StepId
    sampled: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    engine_is_idle: bool = False
    """No replica of the engine had a token to compute: nothing ran, and the wave ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """News of one request, as the frontend sees it."""

    request_id: RequestId
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One for each new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Whole, with the first output, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or string that ended the request; None for the end-of-sequence token."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """State of one DP replica after a step."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    """Blocks no request holds; cached prefixes among them can be reused or evicted."""
    num_preemptions: int
    """Since start."""
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    step_id: int
