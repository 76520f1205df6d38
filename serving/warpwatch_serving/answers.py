"""Answers to a client: documents as JSON, and errors as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from warpwatch_serving.models import Error, ErrorAnswer


class HttpError(Exception):
    """Ends a request with ``status`` and ``{"error": {"reason": …, "detail": …}}``."""

    def __init__(
        self, status: int, reason: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.detail = detail
        self.headers = dict(headers or {})

    def answer(self) -> Response:
        """Return the response."""
        error = Error(reason=self.reason, detail=self.detail)
        return json_answer(ErrorAnswer(error), self.status, self.headers)


def json_answer(
    document: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a dataclass as JSON; numbers that are not finite are null."""
    return Response(_text(document) + b"\n", status, dict(headers or {}), "application/json")


def _text(document: object) -> bytes:
    try:
        return msgspec.json.encode(document, enc_hook=_plain)
    except UnicodeEncodeError:
        # The name of a process or job may hold half a character (a lone surrogate), which only an
        # escape can write. json has escapes, but words of its own for numbers that are not finite.
        escaped = json.dumps(msgspec.to_builtins(document, enc_hook=_plain))
        return json.dumps(json.loads(escaped, parse_constant=lambda _: None)).encode()


def _plain(value: Any) -> object:
    """Return what msgspec encodes of a mapping or sequence that it does not know itself."""
    return dict(value) if isinstance(value, Mapping) else list(value)
