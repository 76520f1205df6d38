"""What the daemon of a node has besides: its own GPUs, what it tells a fleet, and does for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_serving.watcher import Watcher
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest, Prepared
from warpwatch_telemetry.jobs import JobId


class Agent(Watcher, Protocol):
    """What only the daemon of a node has: what it tells a fleet, and does for one.

    Beside that, the anomalies of its own GPUs.
    """

    def resolve_anomaly(self, anomaly_id: str, who: str) -> Anomaly:
        """End an anomaly that only service ends. Raises Refused.

        May wait for the detectors: not from the thread that serves.
        """

    def records(self) -> RecordStream: ...

    def lease(self, job: JobId, holder: str, seconds: float, raised: Mapping[str, str]) -> None:
        """Let a fleet judge the job. Raises Refused while another one does."""

    def request_capture(
        self, request: CaptureRequest, name: str = "", start_step: int | None = None
    ) -> Capture:
        """``name``, ``start_step``: what a fleet has chosen for all nodes."""

    def prepare_capture(self, request: CaptureRequest) -> Prepared:
        """What would be captured; nothing is begun. Raises Refused."""

    def cancel_capture(self, name: str) -> Capture | None:
        """End it, if it runs, for a fleet; None where there is none of this name."""
