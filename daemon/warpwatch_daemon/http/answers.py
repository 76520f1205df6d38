"""What goes back to a client: JSON, and errors as one JSON line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


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
        error = {"reason": self.reason, "detail": self.detail}
        return json_answer({"error": error}, self.status, self.headers)


def json_answer(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Response(text + "\n", status, dict(headers or {}), "application/json")
