"""GET /dashboard and its files, and the stream of events that keeps the page up to date."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError

_FILES = Path(__file__).parent / "static"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # Nothing from elsewhere, and no script within the page.
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_PAGE = "index.html"


def build_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["dashboard"])

    @router.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return RedirectResponse("/dashboard/")

    @router.get("/dashboard/{path:path}", include_in_schema=False)
    async def file(path: str) -> Response:
        """A file of the page."""
        found = (_FILES / (path or _PAGE)).resolve()
        if not found.is_relative_to(_FILES.resolve()) or not found.is_file() or found.suffix not in _MEDIA_TYPES:
            raise ApiError(404, f"the dashboard has no file {path!r}", code="not_found")
        return FileResponse(found, media_type=_MEDIA_TYPES[found.suffix], headers=_HEADERS)

    @router.get("/v1/events")
    async def events() -> Response:
        """The state of the server, once a second, as server-sent events."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(context.live.events(), media_type="text/event-stream", headers=headers)

    return router
