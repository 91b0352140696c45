"""The ASGI application: routes, error handlers and middleware around one context."""

from fastapi import FastAPI, Request, Response

from moeserve.server.context import ServerContext
from moeserve.server.dashboard import routes as dashboard
from moeserve.server.errors import install_error_handlers
from moeserve.server.middleware import AnswerCountMiddleware, ApiKeyMiddleware, BodyLimitMiddleware
from moeserve.server.routes import chat, completions, placement, service, tokenization
from moeserve.server.streaming import ClientGoneError

_CLIENT_CLOSED_REQUEST = 499
"""For the count only: nobody is there to read it."""


def create_app(context: ServerContext) -> FastAPI:
    app = FastAPI(title="moeserve", version=context.version, redoc_url=None)
    install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    for routes in (completions, chat, tokenization, placement, service, dashboard):
        app.include_router(routes.build_router(context))
    server = context.config.server
    # The last one added sees a request first: the key is checked before anything else.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=server.max_body_bytes)
    if server.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=server.api_key, admin_key=server.admin_key)
    app.add_middleware(AnswerCountMiddleware, count=context.metrics.count_answer)
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
