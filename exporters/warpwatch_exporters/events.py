"""Finds the events of anomalies and captures, each once, for exporters that push; their links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from warpwatch_telemetry.anomalies import Anomaly, scope_of, sentence
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.newest import NewestMap
from warpwatch_telemetry.state import State

# Events that other processes have reported, as many as the jobs of a few partitions have.
MAX_REPORTED = 50_000

_OF_REQUEST = ("kind", "trigger", "job", "owner", "run")
_OF_ANOMALY = (
    *("kind", "severity", "job", "owner", "run", "rank", "device", "node"),
    *("step", "value", "baseline", "explained_by"),
)

EventName = Literal["anomaly_opened", "anomaly_closed", "capture_ended", "verdict"]
# Its name, the id of its anomaly or capture, how often that was reopened, its severity.
EventKey = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class StateEvent:
    """An event at ``time`` (wall clock in seconds) of an anomaly or of a capture.

    node: the finder of an anomaly that does not name its node.
    """

    name: EventName
    time: float
    anomaly: Anomaly | None = None
    capture: Capture | None = None
    node: str = ""

    @property
    def key(self) -> EventKey:
        """An anomaly that comes back opens and closes once more; a graver one opens once more."""
        if self.anomaly is not None:
            severity = self.anomaly.severity if self.name == "anomaly_opened" else ""
            return self.name, self.anomaly.id, self.anomaly.reopened, severity
        return self.name, self.capture.id if self.capture else "", 0, ""

    @property
    def anomaly_id(self) -> str | None:
        """The anomaly of the event, or the one that triggered the capture."""
        if self.capture is not None:
            return self.capture.request.anomaly_id
        return self.anomaly.id if self.anomaly else None

    @property
    def summary(self) -> str:
        """One sentence. Parts of it come from training processes."""
        if self.anomaly is not None:
            return sentence(self.anomaly, self.node)
        assert self.capture is not None
        return f"capture of {self.capture.request.job}: {verdict_of(self.capture)}"

    @property
    def facts(self) -> dict[str, str | int | float]:
        """The fields of docs/webhooks.md."""
        known: dict[str, Any] = {"anomaly": self.anomaly_id}
        if (anomaly := self.anomaly) is not None:
            known |= {name: getattr(anomaly, name) for name in _OF_ANOMALY}
            known["scope"] = scope_of(anomaly.kind)
        if (capture := self.capture) is not None:
            request, diagnosis = capture.request, capture.diagnosis or {}
            known |= {name: getattr(request, name) for name in _OF_REQUEST}
            known |= {"capture": capture.id, "outcome": capture.outcome, "report": capture.remote}
            known["verdict"] = diagnosis.get("verdict")
        return {name: value for name, value in known.items() if value not in (None, "")}


class EventFeed:
    """The new events of a state; events of the initial ``state`` are old."""

    def __init__(self, state: State) -> None:
        self._known = {event.key for event in _all(state)}
        self._reported: NewestMap[EventKey, None] = NewestMap(MAX_REPORTED)

    def know(self, anomalies: Iterable[Anomaly]) -> None:
        """Count events of anomalies as old, which another process has reported."""
        for anomaly in anomalies:
            for event in _of_anomaly(anomaly):
                self._reported[event.key] = None

    def drain(self, state: State) -> list[StateEvent]:
        """Return new events, oldest first."""
        events, known = list(_all(state)), self._known | self._reported.keys()
        new = [event for event in events if event.key not in known]
        # Events that the state has dropped do not come again.
        self._known = {event.key for event in events}
        return sorted(new, key=lambda event: event.time)


def _all(state: State) -> Iterator[StateEvent]:
    for anomaly in state.anomalies:
        yield from _of_anomaly(anomaly, state.hostname)
    for capture in state.captures:
        if capture.outcome is None:
            continue
        ended = capture.end_time or capture.time
        yield StateEvent("capture_ended", ended, capture=capture)
        if capture.diagnosis is not None:
            yield StateEvent("verdict", ended, capture=capture)


def _of_anomaly(anomaly: Anomaly, node: str = "") -> Iterator[StateEvent]:
    yield StateEvent("anomaly_opened", anomaly.time, anomaly, node=node)
    if anomaly.end_time is not None:
        yield StateEvent("anomaly_closed", anomaly.end_time, anomaly, node=node)


def verdict_of(capture: Capture) -> str:
    """Return one sentence; a diagnosis contains texts of a training process."""
    diagnosis = capture.diagnosis
    if diagnosis is None:
        why = f", no diagnosis: {capture.diagnosis_outcome}" if capture.diagnosis_outcome else ""
        return f"{capture.request.kind}, {capture.outcome}{why}"
    verdict = str(diagnosis.get("verdict", ""))[:40].replace("_", " ")
    summary = diagnosis.get("summary")
    return f"{verdict}. {summary}" if summary else verdict


def anomaly_link(public_url: str, anomaly_id: str) -> str:
    """Return the page with this anomaly on top; empty without the owner's public address."""
    return _below(public_url, f"/?show={quote(anomaly_id, safe='')}#findings")


def capture_link(public_url: str, capture: Capture) -> str:
    """Return its report, else the page with this capture on top; empty as for an anomaly."""
    ident = quote(capture.id, safe="")
    if "report.html" in capture.files:
        return _below(public_url, f"/api/v1/captures/{ident}/report.html")
    return _below(public_url, f"/?show={ident}#captures")


def _below(public_url: str, path: str) -> str:
    return public_url.rstrip("/") + path if public_url else ""
