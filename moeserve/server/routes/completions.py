"""POST /v1/completions"""

from fastapi import APIRouter, Request, Response

from moeserve.server.answer import answer
from moeserve.server.completion_rendering import CompletionRenderer
from moeserve.server.context import ServerContext
from moeserve.server.errors import invalid
from moeserve.server.generation import Generation, GenerationPlan
from moeserve.server.prompts import encode_prompts
from moeserve.server.rendering import AnswerHead
from moeserve.server.requests import check_stream_options, make_decode, read_priority, skips_special_tokens
from moeserve.server.sampling import build_sampling_params, check_logprobs, check_num_sequences, resolve_max_tokens
from moeserve.server.schemas import CompletionRequest
from moeserve.server.streaming import until_client_gone
from moeserve.server.unsupported import COMPLETION, refuse_unsupported

_DEFAULT_MAX_TOKENS = 16


def build_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        model = context.resolve_model(body.model)
        plan = await until_client_gone(request.receive, _plan(context, body))
        head = AnswerHead.create("cmpl", model, body)
        echoes = _echoes(context, body, plan) if body.echo else None
        generation = Generation(context.engine, plan, head.id)
        renderer = CompletionRenderer(
            head,
            generation,
            context.tokenizer,
            echoes=echoes,
            has_logprobs=body.logprobs is not None,
            skip_special_tokens=skips_special_tokens(body),
        )
        return await answer(request, generation, renderer, stream=bool(body.stream), include_usage=head.include_usage)

    return router


async def _plan(context: ServerContext, body: CompletionRequest) -> GenerationPlan:
    """Raises ApiError for what cannot be done."""
    refuse_unsupported(body.model_extra, COMPLETION)
    check_stream_options(body)
    check_logprobs("logprobs", body.logprobs)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", f"absent or equal to n ({body.n or 1})", body.best_of)
    prompts = await encode_prompts(context, body.prompt, special=body.add_special_tokens is not False)
    check_num_sequences(context, body, len(prompts))
    only_prompt = bool(body.echo) and body.max_tokens == 0
    max_tokens = resolve_max_tokens(
        context,
        prompts,
        1 if only_prompt else body.max_tokens,
        param="max_tokens",
        default=_DEFAULT_MAX_TOKENS,
    )
    params = build_sampling_params(
        context,
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return GenerationPlan(
        prompts=prompts,
        sampling_params=params,
        decode=make_decode(context, body),
        cache_salt=body.cache_salt or "",
        priority=read_priority(body),
        has_output=not only_prompt,
    )


def _echoes(context: ServerContext, body: CompletionRequest, plan: GenerationPlan) -> list[str]:
    """The text of each choice's prompt: as it came, or decoded."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    echoes: list[str] = []
    for index, token_ids in enumerate(plan.prompts):
        text = given[index]
        if not isinstance(text, str):
            text = context.tokenizer.decode(token_ids, skips_special_tokens(body))
        echoes += [text] * plan.sampling_params.n
    return echoes
