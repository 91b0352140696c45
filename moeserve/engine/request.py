"""One request as the scheduler sees it: its tokens, how many of them are computed, and the blocks it holds."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from moeserve.engine.block_hash import BlockHash, block_hash, root_hash
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import FinishReason, TokenLogprobs
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId, RequestId


class RequestStatus(Enum):
    WAITING = auto()
    """Holds no blocks; the ranks do not know it."""
    RUNNING = auto()
    """Holds blocks for all its known tokens but, at times, the last one."""
    FINISHED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A sequence of prompt and output tokens on its way through the engine."""

    request_id: RequestId
    sampling_params: SamplingParams
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    cache_salt: str
    order: tuple[int, int]
    """(priority, arrival): the lower runs first and is preempted last."""
    status: RequestStatus = RequestStatus.WAITING

    num_computed_tokens: int = 0
    """Leading tokens whose KV lies in `block_ids`."""
    block_ids: list[BlockId] = field(default_factory=list)
    num_published_blocks: int = 0
    """Leading blocks that were offered to the prefix cache."""
    num_sent_tokens: int = 0
    """Leading tokens the ranks know; 0: the ranks do not know this request."""
    num_sent_blocks: int = 0

    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted; None before."""
    has_answered: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Gathered over the chunks of the prompt, until the first answer."""
    _block_hashes: list[BlockHash] = field(default_factory=list)

    @staticmethod
    def create(message: AddRequest, *, arrival: int) -> "Request":
        params = message.sampling_params
        if message.output_token_ids and params.prompt_logprobs is not None:
            # Its first answer, which carried them, was given in an earlier life.
            params = replace(params, prompt_logprobs=None)
        return Request(
            request_id=message.request_id,
            sampling_params=params,
            token_ids=[*message.prompt_token_ids, *message.output_token_ids],
            num_prompt_tokens=len(message.prompt_token_ids),
            cache_salt=message.cache_salt,
            order=(message.priority, arrival),
        )

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 while decoding; more: a prompt, or a history to compute again."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def block_hash(self, index: int, block_size: int) -> BlockHash:
        """Name of the full block `index` of its tokens. Each is computed once, whatever happens to the blocks."""
        hashes = self._block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else root_hash(self.cache_salt)
            start = len(hashes) * block_size
            assert start + block_size <= len(self.token_ids), f"block {len(hashes)} is not full"
            hashes.append(block_hash(parent, self.token_ids[start : start + block_size]))
        return hashes[index]

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """The whole prompt's, if asked for; given once, and not asked of the ranks again."""
        if self.sampling_params.prompt_logprobs is None:
            return None
        self.sampling_params = replace(self.sampling_params, prompt_logprobs=None)
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a request ended by itself."""

    reason: FinishReason
    stop_token_id: int | None = None


def check_finish(request: Request, eos_token_ids: frozenset[int]) -> Finish | None:
    """Whether the last output token ends the request.

    Up to `min_tokens` the sampler does not choose stop tokens; one that comes all the same is an ordinary token.
    """
    params = request.sampling_params
    last_token_id = request.token_ids[-1]
    if request.num_output_tokens >= params.min_tokens:
        if last_token_id in eos_token_ids and not params.ignore_eos:
            return Finish(reason=FinishReason.STOP)
        if last_token_id in params.stop_token_ids:
            return Finish(reason=FinishReason.STOP, stop_token_id=last_token_id)
    if request.num_output_tokens >= params.max_tokens:
        return Finish(reason=FinishReason.LENGTH)
    return None
