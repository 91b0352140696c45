"""One API request while the engine works on it: its sequences, and their news as they come."""

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import FinishReason, RequestOutput
from moeserve.engine.sampling_params import SamplingParams, child_seed
from moeserve.ids import RequestId
from moeserve.server.engine_client import EngineClient
from moeserve.server.errors import EngineError
from moeserve.server.responses import PromptTokensDetails, Usage
from moeserve.server.sequence import Decode, OutputSequence, SequenceDelta

_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """What an API request asks the engine for: each prompt, `sampling_params.n` times."""

    prompts: Sequence[list[int]]
    sampling_params: SamplingParams
    decode: Decode
    cache_salt: str = ""
    priority: int = 0
    has_output: bool = True
    """False: only the prompts are wanted (echo with max_tokens 0); what the engine samples is dropped."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.sampling_params.n

    def requests(self, request_id: str) -> Iterator[AddRequest]:
        """One for each sequence, in the order of the choices.

        A seed of the user's makes every prompt as if it were alone; otherwise each prompt draws one.
        """
        mask = (1 << _SEED_BITS) - 1
        given = self.sampling_params.seed
        for prompt_index, prompt_token_ids in enumerate(self.prompts):
            seed = secrets.randbits(_SEED_BITS) if given is None else given & mask
            for index in range(self.sampling_params.n):
                yield AddRequest(
                    request_id=RequestId(f"{request_id}-{prompt_index * self.sampling_params.n + index}"),
                    prompt_token_ids=prompt_token_ids,
                    sampling_params=dataclasses.replace(self.sampling_params, n=1, seed=child_seed(seed, index)),
                    cache_salt=self.cache_salt,
                    priority=self.priority,
                )


class Generation:
    """The sink of the engine's outputs. Whoever made it closes it, which stops what is not finished."""

    def __init__(self, engine: EngineClient, plan: GenerationPlan, request_id: str) -> None:
        """Submits at once. Raises ApiError when the engine takes no requests."""
        requests = list(plan.requests(request_id))
        self.sequences = [
            OutputSequence(index, request, plan.decode, has_output=plan.has_output)
            for index, request in enumerate(requests)
        ]
        self._engine = engine
        self._num_per_prompt = plan.sampling_params.n
        self._by_id = {sequence.request_id: sequence for sequence in self.sequences}
        self._num_unfinished = len(self.sequences)
        self._inbox: list[RequestOutput] = []
        self._failure: Exception | None = None
        self._has_news = asyncio.Event()
        engine.submit(requests, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def put(self, output: RequestOutput) -> None:
        self._inbox.append(output)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._has_news.set()

    def close(self) -> None:
        """Stop the sequences that are not finished."""
        for sequence in self.sequences:
            if not sequence.is_finished:
                self._engine.end(sequence.request_id, FinishReason.ABORT)

    async def deltas(self) -> AsyncIterator[list[SequenceDelta]]:
        """All there is at a time, until every sequence has finished.

        Raises EngineError, or what `fail` was given, when the engine gives up.
        """
        while self._num_unfinished > 0:
            await self._has_news.wait()
            self._has_news.clear()
            inbox, self._inbox = self._inbox, []
            deltas = [delta for output in inbox if (delta := self._advance(output)) is not None]
            if deltas:
                yield deltas
            if self._failure is not None:
                raise self._failure

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many outputs it has."""
        firsts = self.sequences[:: self._num_per_prompt]
        num_prompt_tokens = sum(len(sequence.prompt_token_ids) for sequence in firsts)
        num_output_tokens = sum(sequence.num_output_tokens for sequence in self.sequences)
        return _usage(num_prompt_tokens, num_output_tokens, sum(sequence.num_cached_tokens for sequence in firsts))

    def usage_of(self, index: int) -> Usage:
        """Tokens so far of one sequence and its prompt."""
        sequence = self.sequences[index]
        return _usage(len(sequence.prompt_token_ids), sequence.num_output_tokens, sequence.num_cached_tokens)

    def _advance(self, output: RequestOutput) -> SequenceDelta | None:
        sequence = self._by_id[output.request_id]
        if sequence.is_finished:
            return None  # sent before the engine heard of the stop string
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            sequence.is_finished = True
            raise EngineError(output.error or "the engine stopped this request")
        delta = sequence.advance(output)
        if sequence.is_finished:
            self._num_unfinished -= 1
            if output.finish_reason is None:
                self._engine.end(sequence.request_id, FinishReason.STOP)  # a stop string, which only we see
        return delta


def _usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )
