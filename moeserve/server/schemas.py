"""What clients may send: pydantic models that check types; ranges are checked where the value is used.

Every optional field takes null. Fields nobody here knows are ignored, as OpenAI-compatible servers do, except the ones
in `unsupported`, which would change the output.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag


def _valid_unicode(text: str) -> str:
    """JSON can carry halves of surrogate pairs, which nothing behind this can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, got a lone surrogate") from None
    return text


def _kind_of_prompt(value: Any) -> str | None:
    """Which form a prompt has, by its first element: errors then name the wrong item and not every form."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    if not value or isinstance(value[0], str):
        return "<texts>"
    return "<token id lists>" if isinstance(value[0], list) else "<token ids>"


def _kind_of_text(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def _choose(kind: Any, expected: str) -> Discriminator:
    return Discriminator(kind, custom_error_type="wrong_form", custom_error_message=f"Input should be {expected}")


Text = Annotated[str, AfterValidator(_valid_unicode)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<token ids>")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("<token id lists>")],
    _choose(_kind_of_prompt, "a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
TextOrTexts = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Text], Tag("<list>")],
    _choose(_kind_of_text, "a string or a list of strings"),
]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Request):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Request):
    """What completions and chat have in common."""

    model: Text | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: TextOrTexts | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Text | None = None
    priority: int | None = None
    user: str | None = None
    service_tier: str | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class TextPart(_Request):
    type: Literal["text"]
    text: Text


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Annotated[
            Annotated[Text, Tag("<text>")] | Annotated[list[TextPart], Tag("<list>")],
            _choose(_kind_of_text, "a string or a list of text parts"),
        ]
        | None
    ) = None
    name: Text | None = None

    def as_template_input(self) -> dict[str, str]:
        """The message with its parts joined, as chat templates read it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message = {"role": str(self.role), "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(_Request):
    """POST /tokenize: a prompt or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Request):
    """POST /detokenize"""

    model: Text | None = None
    tokens: TokenIds
