"""What becomes of each alert of a webhook: a capture is asked for once, or why not."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from warpwatch_capturing.alerts.recipes import Recipes, request_for
from warpwatch_capturing.alerts.targets import AlertTarget, Settled, ThisNode, targets_of, this_node
from warpwatch_capturing.board import LiveRank
from warpwatch_capturing.register import CaptureRegister
from warpwatch_telemetry.alerts import (
    ALREADY_CAPTURED,
    CAPTURED,
    DUPLICATE,
    NO_RANK,
    RESOLVED,
    TOO_MANY,
    Alert,
    AlertAnswer,
    NotReadyError,
)
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import State

# Firing alerts of one webhook that are looked at, beside those captured before: a node has a few,
# and Alertmanager's own ``max_alerts`` can cut beforehand.
MAX_ALERTS = 100
MAX_DETAIL_CHARS = 300
# As long as Alertmanager itself remembers an alert (its --data.retention).
REMEMBER_S = 120 * 3600.0
MAX_REMEMBERED = 4096


class _Wanted(NamedTuple):
    """What one alert asks for. number: of the alert in its webhook."""

    number: int
    alert: Alert
    target: AlertTarget


class AlertRequests:
    """``receive`` may be called from any thread.

    What was captured for which alert is known from the capture store, so that a restart of the
    daemon asks for nothing twice. ``state`` is None until the ranks are known; ``request`` raises
    Refused; ``targets``: the live ranks of a job, of which healthy peers are chosen; ``node``: how
    an alert's label ``node`` calls this one.
    """

    def __init__(
        self,
        state: Callable[[], State | None],
        request: Callable[[CaptureRequest], Capture],
        register: CaptureRegister,
        recipes: Recipes,
        targets: Callable[[JobId], Mapping[int, LiveRank]],
        node: str = "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._request_capture = request
        self._register = register
        self._recipes = recipes
        self._local = targets
        self._node = node.lower()
        self._wall = wall
        self._lock = threading.Lock()
        # By the alert's key: when it last came, and its capture.
        self._captured: OrderedDict[str, tuple[float, str]] = OrderedDict()
        for capture in register.all():
            for key in capture.request.alerts:
                self._remember(key, capture.id)

    def receive(self, alerts: Sequence[Alert], own_name: str = "") -> list[AlertAnswer]:
        """One answer for each alert, in their order.

        Raises NotReadyError before the ranks have been looked for the first time.
        ``own_name``: what else this node is called: the address at which Prometheus reaches it.
        """
        state = self._state()
        if state is None:
            raise NotReadyError("the daemon has not looked for ranks yet")
        with self._lock:
            self._forget()
            node = this_node(state, frozenset({self._node, own_name}))
            answers: dict[int, AlertAnswer] = {}
            groups = self._sort(alerts, state, node, answers)
            for wanted in groups:
                self._ask(wanted, state, answers)
        return [answers[number] for number in range(len(alerts))]

    def _sort(
        self, alerts: Sequence[Alert], state: State, node: ThisNode, answers: dict[int, AlertAnswer]
    ) -> Iterable[list[_Wanted]]:
        """What is to be captured, together what becomes one request; the rest is answered."""
        groups: dict[tuple[object, ...], list[_Wanted]] = {}
        looked_at = 0
        for number, alert in enumerate(alerts):
            looked_at += alert.status == "firing" and alert.key not in self._captured
            try:
                for target in self._targets(alert, looked_at, state, node):
                    group = (target.job, target.kind, target.capture)
                    groups.setdefault(group, []).append(_Wanted(number, alert, target))
            except Settled as settled:
                answers[number] = _answer(alert, settled.outcome, str(settled), settled.capture_id)
        return groups.values()

    def _targets(
        self, alert: Alert, looked_at: int, state: State, node: ThisNode
    ) -> tuple[AlertTarget, ...]:
        """Raises Settled."""
        if alert.status == "resolved":
            raise Settled(RESOLVED)
        capture_id = self._capture_of_alert(alert)
        if capture_id is not None:
            self._remember(alert.key, capture_id)
            raise Settled(DUPLICATE, "it has been captured since it fires", capture_id)
        if looked_at > MAX_ALERTS:
            raise Settled(TOO_MANY, f"at most {MAX_ALERTS} alerts of a webhook are looked at")
        targets = targets_of(alert.labels, node)
        for target in targets:
            capture_id = _capture_of_anomaly(target, state)
            if capture_id is not None:
                raise Settled(ALREADY_CAPTURED, f"the {target.kind} has been captured", capture_id)
        return targets

    def _ask(self, wanted: list[_Wanted], state: State, answers: dict[int, AlertAnswer]) -> None:
        try:
            capture_id = self._request(wanted, state)
        except Settled as settled:
            outcome, detail, found = settled.outcome, str(settled), settled.capture_id
        except Refused as refused:
            reason = NO_RANK if refused.reason == "refused_no_rank" else refused.reason
            outcome, detail, found = reason, str(refused), None
        else:
            outcome, detail, found = CAPTURED, "", capture_id
        for number, alert, _ in wanted:
            # Of a device with several jobs, what was captured is the answer.
            if number not in answers or answers[number].capture_id is None:
                answers[number] = _answer(alert, outcome, detail, found)

    def _request(self, wanted: list[_Wanted], state: State) -> str:
        """The capture's id. Raises Settled and Refused."""
        alerts, targets = [one.alert for one in wanted], [one.target for one in wanted]
        job = targets[0].job
        active = [anomaly for anomaly in state.anomalies if anomaly.end_time is None]
        request = request_for(targets, alerts, self._recipes, self._local(job), active)
        capture = self._request_capture(request)
        for key in request.alerts:
            self._remember(key, capture.id)
        return capture.id

    def _capture_of_alert(self, alert: Alert) -> str | None:
        """The one that was begun for this firing, unless the store had no room for it after all."""
        _, capture_id = self._captured.get(alert.key, (0.0, None))
        capture = None if capture_id is None else self._register.get(capture_id)
        if capture is not None and capture.outcome == "refused_disk":
            del self._captured[alert.key]
            return None
        return capture_id

    def _remember(self, key: str, capture_id: str) -> None:
        self._captured.pop(key, None)
        self._captured[key] = (self._wall(), capture_id)
        if len(self._captured) > MAX_REMEMBERED:
            self._captured.popitem(last=False)

    def _forget(self) -> None:
        horizon = self._wall() - REMEMBER_S
        while self._captured and next(iter(self._captured.values()))[0] < horizon:
            self._captured.popitem(last=False)


def _capture_of_anomaly(target: AlertTarget, state: State) -> str | None:
    """Of the anomaly that the alert is about, which its own trigger has had captured."""
    captured = {decision.anomaly_id: decision.capture_id for decision in state.decisions}
    found = [
        captured[anomaly.id]
        for anomaly in state.anomalies
        if anomaly.end_time is None and anomaly.id in captured and _is_of(anomaly, target)
    ]
    return next((capture_id for capture_id in found if capture_id is not None), None)


def _is_of(anomaly: Anomaly, target: AlertTarget) -> bool:
    if anomaly.kind != target.kind:
        return False
    if target.device is not None:
        return anomaly.device == target.device
    any_rank = target.ranks is None or anomaly.rank is None
    return anomaly.job_id == target.job and (any_rank or anomaly.rank in (target.ranks or ()))


def _answer(alert: Alert, outcome: str, detail: str, capture_id: str | None) -> AlertAnswer:
    return AlertAnswer(alert.fingerprint, outcome, detail[:MAX_DETAIL_CHARS], capture_id)
