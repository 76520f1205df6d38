"""Anomalies: what is wrong now, and what was."""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_daemon.http.page.captures import FileLink, capture_view
from warpwatch_daemon.http.page.headline import worst_first
from warpwatch_daemon.http.page.minutes import PlotView, plots
from warpwatch_daemon.quantities import ago, plural, seconds, sentence, text, timestamp
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import CAPTURED, NO_RECIPE, WAITING
from warpwatch_telemetry.state import State

MAX_ACTIVE = 30
MAX_ENDED = 5
# With more, the rest of the page would be far down.
MAX_DRAWN = 8


@dataclass(frozen=True, slots=True)
class FindingView:
    """``diagnosis``: what the capture that it triggered has brought so far.

    ``trigger``: why there is none. ``minutes``: drawings of the minutes around it.
    """

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
    trigger: str
    minutes: tuple[PlotView, ...]


def finding_views(state: State) -> tuple[FindingView, ...]:
    """What is active, the worst first; then what ended, the newest first."""
    ended = [anomaly for anomaly in state.anomalies if anomaly.end_time is not None]
    ended.sort(key=lambda anomaly: -anomaly.time)
    shown = worst_first(state)[:MAX_ACTIVE] + ended[:MAX_ENDED]
    return tuple(_view(one, state, index < MAX_DRAWN) for index, one in enumerate(shown))


def _view(anomaly: Anomaly, state: State, drawn: bool) -> FindingView:
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
        trigger="" if diagnosis else _why_none(anomaly, state),
        minutes=plots(anomaly, state.contexts.get(anomaly.id)) if drawn else (),
    )


def _about(anomaly: Anomaly, state: State) -> str:
    gpus = {sample.device.uuid: f"GPU {sample.device.index}" for sample in state.devices}
    parts = [
        f"job {text(anomaly.job, 60)}" if anomaly.job is not None else "",
        f"rank {anomaly.rank}" if anomaly.rank is not None else "",
        gpus.get(anomaly.device or "", ""),
        f"since step {anomaly.begin_step}" if anomaly.begin_step is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def _when(anomaly: Anomaly, now: float) -> str:
    again = f", came back {plural(anomaly.reopened, 'time')}" if anomaly.reopened else ""
    if anomaly.end_time is None:
        return f"found {ago(anomaly.time, now)}{again}"
    lasted = seconds(float(int(anomaly.end_time - anomaly.time)))
    if anomaly.explained_by is not None:
        return f"explained by another anomaly, {ago(anomaly.end_time, now)}"
    return f"over, {ago(anomaly.end_time, now)}; it lasted {lasted}{again}"


def _capture_of(anomaly: Anomaly, state: State) -> tuple[str, str, FileLink | None]:
    asked = [capture for capture in state.captures if capture.request.anomaly_id == anomaly.id]
    if not asked:
        return "", "", None
    newest = max(asked, key=lambda capture: capture.time)
    view = capture_view(newest, state.time)
    parts = [part for part in (view.verdict, view.explanation) if part]
    return ": ".join(parts) or f"capture {view.outcome}", view.advice, view.report


def _why_none(anomaly: Anomaly, state: State) -> str:
    """What became of its trigger, where that is not a capture."""
    decision = next((d for d in state.decisions if d.anomaly_id == anomaly.id), None)
    if decision is None or decision.outcome in (CAPTURED, NO_RECIPE):
        return ""
    what = "Waits with a capture" if decision.outcome == WAITING else "No capture"
    return f"{what}: {text(decision.detail or decision.outcome, 240)}"
