"""Bodies of requests: declared as JSON, of a bounded size, and there in time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from warpwatch_daemon.http.answers import ApiError
from warpwatch_daemon.http.guard import MAX_BODY_BYTES, too_large

BODY_TIMEOUT_S = 10.0


async def json_body(request: Request) -> bytes:
    """Raises ApiError. Whether it is JSON is for who decodes it to say."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "not_json", "the body must be JSON: Content-Type: application/json")
    return await _read(request)


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
