"""What the HTTP side needs of the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from warpwatch.exporters.prometheus import Options
from warpwatch.telemetry.captures import Capture, CaptureRequest
from warpwatch.telemetry.state import State


class Backend(Protocol):
    """Every method returns at once and may be called from the server's thread."""

    def state(self) -> State: ...

    def exposition(self) -> Options:
        """How ``/metrics`` is written."""

    def missing(self) -> tuple[str, ...]:
        """What keeps the daemon from being ready, one line each; empty when it is."""

    def request_capture(self, request: CaptureRequest) -> Capture:
        """Begin a capture. Raises Refused with a reason from captures.OUTCOMES."""

    def capture_file(self, capture_id: str, name: str) -> Path | None:
        """A stored file of a capture, None if there is no such capture or file."""

    def count_request(self, code: int) -> None: ...
