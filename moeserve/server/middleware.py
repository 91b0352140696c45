"""Pure ASGI middleware: bodies that are too large, keys, and a count of the answers."""

import hmac
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.server.errors import ApiError, describe_failure

_OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/dashboard"})
_OPEN_FOLDER = "/dashboard/"
"""The page asks for the key itself, for what it shows."""


class BodyLimitMiddleware:
    """413 for a body above the limit, by its declared length or, where it comes in chunks, by counting."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await send_error(send, self._too_large(int(length)))
            return
        received = 0

        async def counting_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise self._too_large(received)  # reaches the error handlers through whoever reads the body
            return message

        await self._app(scope, counting_receive, send)

    def _too_large(self, num_bytes: int) -> ApiError:
        message = f"the body must be at most {self._max_body_bytes} bytes, got {num_bytes} or more"
        return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


class ApiKeyMiddleware:
    """401 without `Authorization: Bearer <key>`; health, metrics and version stay open for probes.

    The admin key opens whatever the API key does.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, admin_key: str | None) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not (is_bearer(given, self._api_key) or is_bearer(given, self._admin_key)):
                what = "wrong" if given else "missing"
                message = f"{what} API key: send it as `Authorization: Bearer KEY`"
                headers = {"www-authenticate": "Bearer"}
                await send_error(send, ApiError(401, message, code="invalid_api_key", headers=headers))
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def is_bearer(authorization: bytes, key: str | None) -> bool:
    """Whether the value of an Authorization header carries the key; never, where there is none."""
    return key is not None and hmac.compare_digest(authorization, f"Bearer {key}".encode())


def admin_check(admin_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes that only operators may call: 401 without a key, 403 with another one."""

    async def check(request: Request) -> None:
        if admin_key is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not given:
            message = "missing admin key: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_admin_key", headers={"www-authenticate": "Bearer"})
        if not is_bearer(given, admin_key):
            raise ApiError(403, "this call needs the admin key", code="invalid_admin_key")

    return check


class AnswerCountMiddleware:
    """Tells `count` the route and status of every answer."""

    def __init__(self, app: ASGIApp, *, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The router leaves the route in the scope; a path of the client's own would be a label without bound.
                self._count(getattr(scope.get("route"), "path", "none"), message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)


async def send_error(send: Send, error: ApiError) -> None:
    """Answer from a middleware, before any route."""
    body = describe_failure(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
