"""From the fields of a request to the sampling parameters of the engine."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from moeserve.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError, invalid, invalid_sampling_params
from moeserve.server.prompts import check_token_ids
from moeserve.server.schemas import GenerationRequest

MAX_N = 128
_T = TypeVar("_T")


def resolve_max_tokens(
    context: ServerContext, prompts: Sequence[Sequence[int]], requested: int | None, *, param: str, default: int | None
) -> int:
    """Tokens to generate: as asked for, or `default` (None: all that fits); 400 where prompt and they do not fit."""
    longest = max(len(prompt) for prompt in prompts)
    room = context.max_model_len - longest
    if requested is None:
        return room if default is None else min(default, room)
    if not 1 <= requested <= room:
        accepted = f"between 1 and {room} (a context of {context.max_model_len} tokens less {longest} of the prompt)"
        raise invalid(param, accepted, requested)
    return requested


def check_count(param: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(param, f"between {low} and {high}", value)


def check_logprobs(param: str, value: int | None) -> None:
    check_count(param, value, 0, MAX_LOGPROBS)


def check_num_sequences(context: ServerContext, request: GenerationRequest, num_prompts: int) -> None:
    """A request for more sequences than the server holds could never be taken."""
    check_count("n", request.n, 1, MAX_N)
    total, limit = num_prompts * (request.n or 1), context.engine.max_unfinished
    if total > limit:
        message = f"n times the number of prompts must be at most {limit}, got {total}"
        raise ApiError(400, message, param="n", code="invalid_value")


def build_sampling_params(
    context: ServerContext,
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Raises ApiError (400) that names the field, its value and the range."""
    stop = _or(request.stop, [])
    stop_token_ids = request.stop_token_ids or []
    check_token_ids(context.tokenizer, stop_token_ids, param="stop_token_ids")
    top_k = _or(request.top_k, 0)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_or(request.min_tokens, 0),
            temperature=_or(request.temperature, 1.0),
            top_p=_or(request.top_p, 1.0),
            top_k=0 if top_k == -1 else min(top_k, context.tokenizer.vocab_size),
            min_p=_or(request.min_p, 0.0),
            presence_penalty=_or(request.presence_penalty, 0.0),
            frequency_penalty=_or(request.frequency_penalty, 0.0),
            repetition_penalty=_or(request.repetition_penalty, 1.0),
            logit_bias=_read_logit_bias(context, request.logit_bias or {}),
            seed=request.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=_or(request.n, 1),
        )
    except ValueError as error:
        raise invalid_sampling_params(error) from error


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _read_logit_bias(context: ServerContext, by_text: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    biases = {}
    for key, bias in by_text.items():
        if not (key.isascii() and key.isdecimal() and int(key) < context.tokenizer.vocab_size):
            accepted = f"a token id between 0 and {context.tokenizer.vocab_size - 1}"
            raise ApiError(400, f"logit_bias keys must be {accepted}, got {key!r}", param="logit_bias")
        biases[int(key)] = bias
    return biases
