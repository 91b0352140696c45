"""Errors as the API shows them: OpenAI's shape, a status code, and for bad input the field, its value and the range."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

_MAX_SHOWN_VALUE_CHARS = 80
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """An answer other than success. `param` is the field of the request that is wrong."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, headers)
        self.param = param
        self.code = code


class EngineError(Exception):
    """The engine gave up on a request it had accepted."""


def invalid(param: str, requirement: str, value: object) -> ApiError:
    """400: `param` must be `requirement`, got `value`."""
    return ApiError(400, f"{param} must be {requirement}, got {show(value)}", param=param, code="invalid_value")


def invalid_sampling_params(error: ValueError) -> ApiError:
    """400 for a ValueError of SamplingParams, whose message begins with the field's name."""
    param = str(error).partition(" ")[0].partition("[")[0]
    return ApiError(400, str(error), param=param, code="invalid_value")


def show(value: object) -> str:
    """The value as JSON, cut where it is long."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN_VALUE_CHARS else text[:_MAX_SHOWN_VALUE_CHARS] + "..."


def error_body(status_code: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """`{"error": {...}}`, for a response or for the last event of a stream."""
    message = message.encode("utf-8", "replace").decode()  # lone surrogates of the user's input
    kind = _TYPES.get(status_code, "invalid_request_error" if status_code < 500 else "internal_server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def describe_failure(error: BaseException) -> bytes:
    """Error body for whatever ended a request; what is not the user's business is logged, not shown."""
    if isinstance(error, ApiError):
        return error_body(error.status_code, str(error.detail), param=error.param, code=error.code)
    if isinstance(error, EngineError):
        return error_body(500, str(error), code="engine_error")
    logger.error("request failed", exc_info=error)
    return error_body(500, "internal error", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Every error of the application, expected or not, leaves in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(EngineError, _on_engine_error)
    app.add_exception_handler(Exception, _on_unexpected_error)


def _respond(status_code: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status_code, dict(headers or {}), "application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return _respond(error.status_code, describe_failure(error), error.headers)
    messages = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = messages.get(error.status_code) or str(error.detail) or HTTPStatus(error.status_code).phrase
    return _respond(error.status_code, error_body(error.status_code, message), error.headers)


async def _on_engine_error(request: Request, error: Exception) -> Response:
    return _respond(500, describe_failure(error))


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    # Starlette raises it again once this is sent, and uvicorn logs it with its stack.
    return _respond(500, error_body(500, "internal error", code="internal_error"))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, param = _explain(error.errors())
    return _respond(400, error_body(400, message, param=param, code="invalid_value"))


def _explain(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """One sentence about the first wrong field of pydantic's list, and its path."""
    first = errors[0]
    location = first["loc"][1:]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if not location or not isinstance(location[0], str):
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    path = _path(location)
    if first["type"] == "extra_forbidden":
        return f"{path} is not known here", path
    if first["type"] == "missing":
        return f"{path} is missing", path
    if first["type"] == "value_error":
        return f"{path} {first['ctx']['error']}", path
    return f"{path} must be {first['msg'].removeprefix('Input should be ')}, got {show(first['input'])}", path


def _path(location: Sequence[str | int]) -> str:
    """messages[0].content; the names of union members, in angle brackets, are nothing that a client wrote."""
    parts = (part for part in location if not (isinstance(part, str) and part.startswith("<")))
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
