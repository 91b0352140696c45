"""POST /tokenize and /detokenize, in vLLM's shapes"""

from fastapi import APIRouter, Response

from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError
from moeserve.server.prompts import check_token_ids, encode, encode_chat
from moeserve.server.responses import Detokenized, Tokenized
from moeserve.server.schemas import DetokenizeRequest, TokenizeRequest
from moeserve.server.streaming import JsonResponse


def build_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt, or of messages as the chat template writes them."""
        context.resolve_model(body.model)
        token_ids = await _tokenize(context, body)
        texts = [context.tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        return JsonResponse(
            Tokenized(count=len(token_ids), max_model_len=context.max_model_len, tokens=token_ids, token_strs=texts)
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, special tokens included."""
        context.resolve_model(body.model)
        check_token_ids(context.tokenizer, body.tokens, param="tokens")
        return JsonResponse(Detokenized(prompt=context.tokenizer.decode(body.tokens, skip_special_tokens=False)))

    return router


async def _tokenize(context: ServerContext, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages must be given, and not both", param="prompt")
    if body.prompt is not None:
        return await encode(context.tokenizer, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return await encode_chat(
        context,
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
        variables=body.chat_template_kwargs or {},
    )
