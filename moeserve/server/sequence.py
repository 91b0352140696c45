"""One output of one prompt: what the engine said of it so far, turned into text that is certain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeserve.engine.detokenizer import Detokenizer
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from moeserve.ids import RequestId

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """News of one sequence; never empty."""

    index: int
    text: str
    logprobs: Sequence[TokenLogprobs]
    """Of the tokens that gave `text`, when they were asked for."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop string or token id; None for the end-of-sequence token."""


class OutputSequence:
    """Takes the outputs of one request of the engine and gives deltas."""

    def __init__(self, index: int, request: AddRequest, decode: Decode, *, has_output: bool) -> None:
        params = request.sampling_params
        self.index = index
        """Of the choice, over all prompts."""
        self.request_id: RequestId = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.is_finished = False
        self._keeps_stop_text = params.include_stop_str_in_output
        self._has_output = has_output
        self._held_logprobs: list[TokenLogprobs] = []
        self._detokenizer = Detokenizer(
            decode,
            request.prompt_token_ids,
            params.stop,
            params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def advance(self, output: RequestOutput) -> SequenceDelta | None:
        """None while nothing new is certain. After a delta with a stop string the engine must be told."""
        assert not self.is_finished
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        self.is_finished = finish_reason is not None
        if not self._has_output:
            return self._delta("", finish_reason, stop_reason) if self.is_finished else None
        token_ids = output.new_token_ids
        ends_with_stop_token = finish_reason is FinishReason.STOP and bool(token_ids)
        shown_ids = token_ids[:-1] if ends_with_stop_token and not self._keeps_stop_text else token_ids
        news = self._detokenizer.append(shown_ids)
        num_tokens, text = len(token_ids), news.text
        if news.stop_reason is not None:
            num_tokens = news.num_tokens
            finish_reason, stop_reason = FinishReason.STOP, news.stop_reason
        elif self.is_finished:
            text += self._detokenizer.finish()
        self.is_finished = finish_reason is not None
        self.num_output_tokens += num_tokens
        if output.logprobs is not None:
            self._held_logprobs += output.logprobs[:num_tokens]
        return self._delta(text, finish_reason, stop_reason) if text or self.is_finished else None

    def _delta(self, text: str, finish_reason: FinishReason | None, stop_reason: int | str | None) -> SequenceDelta:
        logprobs, self._held_logprobs = self._held_logprobs, []
        return SequenceDelta(
            index=self.index, text=text, logprobs=logprobs, finish_reason=finish_reason, stop_reason=stop_reason
        )
