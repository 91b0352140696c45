"""Small rules that completions and chat share."""

from functools import partial

from moeserve.server.context import ServerContext
from moeserve.server.errors import invalid
from moeserve.server.schemas import GenerationRequest
from moeserve.server.sequence import Decode

_MAX_PRIORITY = 2**31 - 1


def check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("stream_options", "null or absent where stream is not true", options.model_dump())


def read_priority(request: GenerationRequest) -> int:
    """Lower runs earlier."""
    priority = request.priority or 0
    if not -_MAX_PRIORITY <= priority <= _MAX_PRIORITY:
        raise invalid("priority", f"between {-_MAX_PRIORITY} and {_MAX_PRIORITY}", priority)
    return priority


def skips_special_tokens(request: GenerationRequest) -> bool:
    return request.skip_special_tokens is not False


def make_decode(context: ServerContext, request: GenerationRequest) -> Decode:
    return partial(context.tokenizer.decode, skip_special_tokens=skips_special_tokens(request))
