"""The interface between HTTP and the agent or fleet, and the part of its state that a user sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_exporters.prometheus import Options
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.alerts import Alert, AlertAnswer
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly, AnomalyContext
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State


class ApiBackend(Protocol):
    """An agent or a fleet. The server's thread calls a method unless the method may wait.

    metrics: the process's own metrics.
    """

    metrics: AgentMetrics

    async def prepare(self, path: str) -> None:
        """Fetch from other processes what a request for this path may need."""

    def state(self) -> State: ...

    def overview(self) -> State:
        """Return the state without its ranks: those of a large fleet take a second."""

    def exported(self) -> State:
        """Return the part of the state that ``/metrics`` shows."""

    def exposition(self) -> Options:
        """Return how ``/metrics`` is written."""

    def missing(self) -> tuple[str, ...]:
        """Return why the process is not ready, one line per reason; empty if it is."""

    def request_capture(self, request: CaptureRequest) -> Capture:
        """Start a capture; may wait. Raises Refused with a reason from captures.OUTCOMES."""

    def capture_file(
        self, capture_id: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None:
        """Return the path of a capture's file, or the parts that another node sends of it.

        Returns None if no capture of ``owner`` has such a file; an owner of None admits all. May
        wait for an agent. Raises Refused if the agent does not answer.
        """

    def anomaly(self, anomaly_id: str) -> tuple[Anomaly, AnomalyContext | None] | None:
        """Return an anomaly of the history. May wait for a disk."""

    def run_summaries(self) -> Sequence[RunSummary]:
        """Return current and ended runs, oldest first. May wait for a disk."""

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, Sequence[DetectorStatus]], Sequence[Suppressed]]:
        """Return the readings of the detectors by kind, and findings that others explain.

        May wait for the detectors.
        """

    def receive_alerts(self, alerts: Sequence[Alert], own_name: str) -> Sequence[AlertAnswer]:
        """Return the outcome of each alert; ``own_name``: the host under which they were sent.

        May wait for a disk or an agent.
        """


def visible(state: State, owner: str | None) -> State:
    """Return the part of the state that ``Caller.owner`` may see."""
    if owner is None:
        return state
    anomalies = tuple(one for one in state.anomalies if may_see(one, owner))
    shown = {anomaly.id for anomaly in anomalies}
    return replace(
        state,
        ranks=tuple(rank for rank in state.ranks if rank.owner == owner),
        jobs=tuple(job for job in state.jobs if job.owner == owner),
        anomalies=anomalies,
        contexts={ident: one for ident, one in state.contexts.items() if ident in shown},
        captures=tuple(one for one in state.captures if one.request.owner == owner),
        sensitivities=tuple(one for one in state.sensitivities if one.owner == owner),
        decisions=tuple(one for one in state.decisions if one.anomaly_id in shown),
    )


def may_see(anomaly: Anomaly, owner: str) -> bool:
    """Return whether the anomaly is of a device, or of a job of this owner."""
    return anomaly.kind in DEVICE_KINDS or anomaly.owner == owner
