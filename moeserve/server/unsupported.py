"""Features of other servers that would change the output, and are refused rather than ignored."""

from collections.abc import Mapping, Sequence
from typing import Any

from moeserve.server.errors import ApiError, show

_NOTHING: tuple[Any, ...] = ()
_IN_BOTH: Mapping[str, Sequence[Any]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "use_beam_search": _NOTHING,
    "length_penalty": (1, 1.0),
    "prompt_logprobs": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "allowed_token_ids": _NOTHING,
    "bad_words": _NOTHING,
}
COMPLETION: Mapping[str, Sequence[Any]] = {**_IN_BOTH, "suffix": _NOTHING, "prompt_embeds": _NOTHING}
CHAT: Mapping[str, Sequence[Any]] = {
    **_IN_BOTH,
    "tools": _NOTHING,
    "tool_choice": ("none",),
    "functions": _NOTHING,
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "verbosity": ("medium",),
    "best_of": _NOTHING,
    "echo": _NOTHING,
    "documents": _NOTHING,
    "chat_template": _NOTHING,
    "continue_final_message": _NOTHING,
}
CHAT_MESSAGE: Mapping[str, Sequence[Any]] = {"tool_calls": _NOTHING, "function_call": _NOTHING, "audio": _NOTHING}


def refuse_unsupported(
    fields: Mapping[str, Any] | None, refused: Mapping[str, Sequence[Any]], *, path: str = ""
) -> None:
    """400 for a refused field, unless it is empty or asks for what happens anyway."""
    for name, value in (fields or {}).items():
        if name not in refused or not value or value in refused[name]:
            continue
        accepted = "".join(f" or {show(neutral)}" for neutral in refused[name])
        message = f"{path}{name} is not supported: it must be absent{accepted}, got {show(value)}"
        raise ApiError(400, message, param=path + name, code="unsupported_parameter")
