"""A generation as the client asked for it: one whole answer, or a stream of events."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from fastapi import Request, Response

from moeserve.server.generation import Generation
from moeserve.server.rendering import WholeOutput, collect
from moeserve.server.streaming import EventRenderer, GenerationStream, JsonResponse, until_client_gone


class AnswerRenderer(EventRenderer, Protocol):
    """An endpoint's own way to say the same thing whole."""

    def whole(self, outputs: Sequence[WholeOutput]) -> msgspec.Struct: ...


async def answer(
    request: Request, generation: Generation, renderer: AnswerRenderer, *, stream: bool, include_usage: bool
) -> Response:
    """Ends the generation when the client goes away. include_usage: of a stream; a whole answer always has it."""
    if stream:
        return GenerationStream(generation, renderer, include_usage=include_usage)
    with generation:
        outputs = await until_client_gone(request.receive, collect(generation))
        return JsonResponse(renderer.whole(outputs))
