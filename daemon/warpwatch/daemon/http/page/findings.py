"""Anomalies: what is wrong now, and what was."""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch.daemon.http.page.captures import FileLink, capture_view
from warpwatch.daemon.http.page.quantities import ago, seconds, sentence, text, timestamp
from warpwatch.daemon.http.page.verdict import worst_first
from warpwatch.telemetry.anomalies import Anomaly
from warpwatch.telemetry.state import State

MAX_ACTIVE = 30
MAX_ENDED = 5


@dataclass(frozen=True, slots=True)
class FindingView:
    """``diagnosis``: what the capture that it triggered has brought so far."""

    kind: str
    severity: str
    summary: str
    about: str
    active: bool
    when: str
    timestamp: str
    diagnosis: str
    advice: str
    report: FileLink | None


def finding_views(state: State) -> tuple[FindingView, ...]:
    """What is active, the worst first; then what ended, the newest first."""
    ended = [anomaly for anomaly in state.anomalies if anomaly.end_time is not None]
    ended.sort(key=lambda anomaly: -anomaly.time)
    shown = worst_first(state)[:MAX_ACTIVE] + ended[:MAX_ENDED]
    return tuple(_view(anomaly, state) for anomaly in shown)


def _view(anomaly: Anomaly, state: State) -> FindingView:
    diagnosis, advice, report = _capture_of(anomaly, state)
    return FindingView(
        kind=sentence(anomaly.kind.replace("_", " "), 40),
        severity=anomaly.severity,
        summary=sentence(anomaly.summary, 240),
        about=_about(anomaly, state),
        active=anomaly.end_time is None,
        when=_when(anomaly, state.time),
        timestamp=timestamp(anomaly.time),
        diagnosis=diagnosis,
        advice=advice,
        report=report,
    )


def _about(anomaly: Anomaly, state: State) -> str:
    places = {sample.device.uuid: f"GPU {sample.device.index}" for sample in state.devices}
    parts = [
        f"job {text(anomaly.job, 60)}" if anomaly.job is not None else "",
        f"rank {anomaly.rank}" if anomaly.rank is not None else "",
        places.get(anomaly.device or "", ""),
        f"since step {anomaly.begin_step}" if anomaly.begin_step is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def _when(anomaly: Anomaly, now: float) -> str:
    if anomaly.end_time is None:
        return f"found {ago(anomaly.time, now)}"
    lasted = seconds(float(int(anomaly.end_time - anomaly.time)))
    return f"over, {ago(anomaly.end_time, now)}; it lasted {lasted}"


def _capture_of(anomaly: Anomaly, state: State) -> tuple[str, str, FileLink | None]:
    asked = [capture for capture in state.captures if capture.request.anomaly_id == anomaly.id]
    if not asked:
        return "", "", None
    newest = max(asked, key=lambda capture: capture.time)
    view = capture_view(newest, state.time)
    parts = [part for part in (view.verdict, view.explanation) if part]
    return ": ".join(parts) or f"capture {view.outcome}", view.advice, view.report
