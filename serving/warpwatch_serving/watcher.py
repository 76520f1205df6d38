"""What the HTTP side needs of who watches: the agent of a node, or a fleet over many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from warpwatch_detection.anomalies.register_state import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_exporters.prometheus import Options
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.alerts import Alert, AlertAnswer
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State


class Watcher(Protocol):
    """Called from the server's thread; every method returns at once, but where it says.

    metrics: those of the daemon itself.
    """

    metrics: AgentMetrics

    def state(self) -> State: ...

    def exported(self) -> State:
        """What of the state is on ``/metrics``."""

    def exposition(self) -> Options:
        """How ``/metrics`` is written."""

    def missing(self) -> tuple[str, ...]:
        """What keeps the daemon from being ready, one line each; empty when it is."""

    def request_capture(self, request: CaptureRequest) -> Capture:
        """Begin a capture. Raises Refused with a reason from captures.OUTCOMES."""

    def capture_file(
        self, capture_id: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None:
        """Where a file of a capture lies, or what another node sends of it; None: there is none.

        ``owner``: whose capture it must be, None for anybody's. May wait for an agent: not from the
        thread that serves. Raises Refused where one does not answer.
        """

    def anomaly(self, anomaly_id: str) -> tuple[Anomaly, AnomalyContext | None] | None:
        """An anomaly of the history. May wait for a disk: not from the thread that serves."""

    def run_summaries(self) -> Sequence[RunSummary]:
        """Runs that go on and those that ended, oldest first. Takes a while: as ``anomaly``."""

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, Sequence[DetectorStatus]], Sequence[Suppressed]]:
        """How the detectors see what they judge, by kind, and what is found and explained.

        May wait for the detectors: not from the thread that serves.
        """

    def receive_alerts(self, alerts: Sequence[Alert], own_name: str) -> Sequence[AlertAnswer]:
        """What becomes of each alert, in their order; the name is ``AlertRequests.receive``'s.

        May wait for a disk or an agent: not from the thread that serves.
        """
