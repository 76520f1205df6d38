"""What comes with a request, read into its model: the query's filters, and the body.

A body is declared as JSON, of a bounded size, and there in time. Every error is an ApiError.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from warpwatch_runtime.loading import mistakes
from warpwatch_serving.answers import ApiError
from warpwatch_serving.guard import MAX_BODY_BYTES, too_large
from warpwatch_serving.models import Filters

BODY_TIMEOUT_S = 10.0
# An error names what was found there; it may be long.
MAX_ERROR_CHARS = 200

F = TypeVar("F", bound=Filters)
M = TypeVar("M", bound=BaseModel)


def filters(request: Request, model: type[F]) -> F:
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise _explained(error, model, "query: ") from error


async def json_body(request: Request, model: type[M]) -> M:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "not_json", "the body must be JSON: Content-Type: application/json")
    content = await _read(request)
    try:
        return model.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise _explained(error, model) from error


def _explained(error: ValidationError, model: type[BaseModel], where: str = "") -> ApiError:
    """The first mistake, in one line."""
    text = mistakes(error, model)[0].without_value()
    return ApiError(400, "bad_request", where + text[:MAX_ERROR_CHARS])


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large()
    except (TimeoutError, ClientDisconnect) as error:
        raise ApiError(408, "timeout", "the body did not arrive in time") from error
    return bytes(body)
