"""What goes back to a client: JSON, and errors as one JSON line."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from starlette.responses import Response

from warpwatch_serving.models import Error, ErrorAnswer


class ApiError(Exception):
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
        error = Error(reason=self.reason, detail=self.detail)
        return json_answer(ErrorAnswer(error=error), self.status, self.headers)


def json_answer(
    document: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(_text(document) + "\n", status, dict(headers or {}), "application/json")


def _text(document: BaseModel) -> str:
    try:
        return document.model_dump_json()
    except PydanticSerializationError:
        # The name of a process or job may hold half a character (a lone surrogate), which only an
        # escape can write. json has escapes, but words of its own for numbers that are not finite.
        escaped = json.dumps(document.model_dump(mode="json"))
        return json.dumps(json.loads(escaped, parse_constant=lambda _: None))
