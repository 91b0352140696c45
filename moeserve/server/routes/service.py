"""What clients and operators ask about the server: models, health, metrics, version"""

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError
from moeserve.server.middleware import admin_check
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
        """200 while every replica is ready; 503 before that, while ranks are started again, and while draining."""
        context.engine.find_lost_replicas()
        if not context.engine.is_ready:
            raise ApiError(503, "the engine is not ready", code="engine_not_ready", headers={"retry-after": "1"})
        if context.engine.is_draining:
            raise ApiError(503, "the server is draining: it takes no new requests", code="draining")
        return Response()

    admin = [Depends(admin_check(context.config.server.admin_key))]

    @router.post("/v1/drain", dependencies=admin)
    async def drain() -> Response:
        """Refuse new requests from now on; those that are here run to their end."""
        context.engine.is_draining = True
        return JsonResponse({"draining": True, "num_unfinished": context.engine.num_unfinished})

    @router.post("/v1/undrain", dependencies=admin)
    async def undrain() -> Response:
        """Take requests again."""
        context.engine.is_draining = False
        return JsonResponse({"draining": False, "num_unfinished": context.engine.num_unfinished})

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
