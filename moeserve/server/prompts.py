"""Prompts of requests as token ids, checked against vocabulary and context."""

import asyncio
from collections.abc import Sequence
from typing import Any

from moeserve.chat_template import ChatTemplateError
from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError, invalid
from moeserve.server.schemas import ChatMessage
from moeserve.server.unsupported import CHAT_MESSAGE, refuse_unsupported
from moeserve.tokenizer import Tokenizer

_MAX_CHARS_IN_LOOP = 4096
"""Longer texts are encoded in a thread, so that the streams of others go on."""


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if len(text) <= _MAX_CHARS_IN_LOOP:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


async def encode_prompts(
    context: ServerContext, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], *, special: bool
) -> list[list[int]]:
    """Each prompt of a completion request. `special`: add the tokenizer's special tokens to texts."""
    if not prompt:
        raise invalid("prompt", "not empty", prompt)
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [await _encode_one(context, prompt, special=special, param="prompt")]
    items = enumerate(prompt)
    return [await _encode_one(context, item, special=special, param=f"prompt[{index}]") for index, item in items]


async def _encode_one(context: ServerContext, item: Any, *, special: bool, param: str) -> list[int]:
    if not item:
        raise invalid(param, "not empty", item)
    if isinstance(item, str):
        token_ids = await encode(context.tokenizer, item, add_special_tokens=special)
    else:
        token_ids = list(item)
        check_token_ids(context.tokenizer, token_ids, param=param)
    check_prompt_length(context, token_ids, param=param)
    return token_ids


def check_token_ids(tokenizer: Tokenizer, token_ids: Sequence[int], *, param: str) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            accepted = f"a token id between 0 and {tokenizer.vocab_size - 1}"
            raise invalid(f"{param}[{index}]", accepted, token_id)


def check_prompt_length(context: ServerContext, token_ids: Sequence[int], *, param: str) -> None:
    """At least one token, and room for one of output."""
    longest = context.max_model_len - 1
    if not 1 <= len(token_ids) <= longest:
        message = (
            f"{param} must be between 1 and {longest} tokens long (the context is {context.max_model_len} tokens, "
            f"one of them for output), got {len(token_ids)} tokens"
        )
        code = "context_length_exceeded" if token_ids else "invalid_value"
        raise ApiError(400, message, param=param, code=code)


async def encode_chat(
    context: ServerContext,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    add_special_tokens: bool | None,
    variables: dict[str, Any],
) -> list[int]:
    """The conversation by the model's chat template, which writes the special tokens itself."""
    if not messages:
        raise invalid("messages", "a list of at least one message", messages)
    for index, message in enumerate(messages):
        refuse_unsupported(message.model_extra, CHAT_MESSAGE, path=f"messages[{index}].")
    try:
        text = context.tokenizer.apply_chat_template(
            [message.as_template_input() for message in messages],
            add_generation_prompt=add_generation_prompt is not False,
            **variables,
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error
    return await encode(context.tokenizer, text, add_special_tokens=bool(add_special_tokens))
