"""Anomalies: what is wrong now, and what was."""

from __future__ import annotations

from warpwatch_runtime.quantities import ago, plural, seconds, text
from warpwatch_serving.bodies import PageFilters
from warpwatch_serving.page.headline import worst_first
from warpwatch_telemetry.anomalies import Anomaly, sentence
from warpwatch_telemetry.captures import CAPTURED, NO_RECIPE, WAITING, Capture
from warpwatch_telemetry.state import State

# Rows, unless all are asked for.
MAX_ACTIVE = 20
MAX_ENDED = 5
# The first are shown with their drawings and diagnosis, the others as rows.
MAX_CARDS = 3


def listed(state: State, wanted: PageFilters) -> list[Anomaly]:
    """That with the id ``show``; what is active, the worst first; what ended, the newest first."""
    chosen = [anomaly for anomaly in state.anomalies if anomaly.id == wanted.show]
    ended = [anomaly for anomaly in state.anomalies if anomaly.end_time is not None]
    ended.sort(key=lambda anomaly: -anomaly.time)
    others = worst_first(state)[: None if wanted.all else MAX_ACTIVE] + ended[:MAX_ENDED]
    return chosen + [anomaly for anomaly in others if anomaly.id != wanted.show]


def active(state: State) -> int:
    return sum(1 for anomaly in state.anomalies if anomaly.end_time is None)


def said(anomaly: Anomaly, state: State) -> str:
    return sentence(anomaly, state.hostname)


def when(anomaly: Anomaly, state: State) -> str:
    now = state.time
    again = f", came back {plural(anomaly.reopened, 'time')}" if anomaly.reopened else ""
    if anomaly.end_time is None:
        return f"found {ago(anomaly.time, now)}{again}"
    lasted = seconds(float(int(anomaly.end_time - anomaly.time)))
    if anomaly.explained_by is not None:
        kinds = {one.id: one.kind.replace("_", " ") for one in state.anomalies}
        cause = kinds.get(anomaly.explained_by, "another anomaly")
        return f"explained by {cause}, {ago(anomaly.end_time, now)}"
    return f"over, {ago(anomaly.end_time, now)}; it lasted {lasted}{again}"


def capture_of(anomaly: Anomaly, state: State) -> Capture | None:
    """The newest that it has triggered."""
    asked = [capture for capture in state.captures if capture.request.anomaly_id == anomaly.id]
    return max(asked, key=lambda capture: capture.time, default=None)


def why_no_capture(anomaly: Anomaly, state: State) -> str:
    """Empty where none was wanted."""
    decision = next((d for d in state.decisions if d.anomaly_id == anomaly.id), None)
    if decision is None or decision.outcome in (CAPTURED, NO_RECIPE):
        return ""
    what = "Waits with a capture" if decision.outcome == WAITING else "No capture"
    return f"{what}: {text(decision.detail or decision.outcome, 240)}"
