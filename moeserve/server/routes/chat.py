"""POST /v1/chat/completions"""

from fastapi import APIRouter, Request, Response

from moeserve.server.answer import answer
from moeserve.server.chat_rendering import ChatRenderer
from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError
from moeserve.server.generation import Generation, GenerationPlan
from moeserve.server.prompts import check_prompt_length, encode_chat
from moeserve.server.rendering import AnswerHead
from moeserve.server.requests import check_stream_options, make_decode, read_priority
from moeserve.server.sampling import build_sampling_params, check_logprobs, check_num_sequences, resolve_max_tokens
from moeserve.server.schemas import ChatCompletionRequest
from moeserve.server.streaming import until_client_gone
from moeserve.server.unsupported import CHAT, refuse_unsupported


def build_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = context.resolve_model(body.model)
        plan = await until_client_gone(request.receive, _plan(context, body))
        head = AnswerHead.create("chatcmpl", model, body)
        generation = Generation(context.engine, plan, head.id)
        renderer = ChatRenderer(head, generation, context.tokenizer, has_logprobs=bool(body.logprobs))
        return await answer(request, generation, renderer, stream=bool(body.stream), include_usage=head.include_usage)

    return router


async def _plan(context: ServerContext, body: ChatCompletionRequest) -> GenerationPlan:
    """Raises ApiError for what cannot be done."""
    refuse_unsupported(body.model_extra, CHAT)
    check_stream_options(body)
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, f"top_logprobs must be 0 or absent without logprobs, got {body.top_logprobs}", param="top_logprobs"
        )
    check_num_sequences(context, body, num_prompts=1)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    prompt_token_ids = await encode_chat(
        context,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
        variables=variables,
    )
    check_prompt_length(context, prompt_token_ids, param="messages")
    newer = body.max_completion_tokens is not None
    max_tokens = resolve_max_tokens(
        context,
        [prompt_token_ids],
        body.max_completion_tokens if newer else body.max_tokens,
        param="max_completion_tokens" if newer else "max_tokens",
        default=None,
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = build_sampling_params(context, body, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=None)
    return GenerationPlan(
        prompts=[prompt_token_ids],
        sampling_params=params,
        decode=make_decode(context, body),
        cache_salt=body.cache_salt or "",
        priority=read_priority(body),
    )
