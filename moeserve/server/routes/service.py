"""What clients and operators ask about the server: models, health, metrics, version"""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError
from moeserve.server.responses import ModelCard, ModelList
from moeserve.server.streaming import JsonResponse


def build_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The names this server answers to."""
        return JsonResponse(ModelList(data=[_card(context, name) for name in context.config.model.served_names]))

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JsonResponse(_card(context, context.resolve_model(name)))

    @router.get("/health")
    async def health() -> Response:
        """200 while every replica is ready, 503 before that and while ranks are started again."""
        context.engine.find_lost_replicas()
        if not context.engine.is_ready:
            raise ApiError(503, "the engine is not ready", code="engine_not_ready", headers={"retry-after": "1"})
        return Response()

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": context.version}

    return router


def _card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=context.created, root=context.config.model.model, max_model_len=context.max_model_len
    )
