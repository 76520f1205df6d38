"""What becomes of each alert of a webhook: a capture is asked for once, or why not."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from warpwatch_daemon.captures.alerts.requests import request_for
from warpwatch_daemon.captures.alerts.targets import Here, Settled, Target, here, targets_of
from warpwatch_daemon.captures.alerts.webhook import Alert
from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.alerts import (
    ALREADY_CAPTURED,
    CAPTURED,
    DUPLICATE,
    NO_RANK,
    RESOLVED,
    TOO_MANY,
)
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.state import State

# Firing alerts of one webhook that are looked at, beside those captured before: a node has a few,
# and Alertmanager's own ``max_alerts`` can cut beforehand.
MAX_ALERTS = 100
MAX_DETAIL_CHARS = 300
# As long as Alertmanager itself remembers an alert (its --data.retention).
REMEMBER_S = 120 * 3600.0
MAX_REMEMBERED = 4096
# The same refusal of the same is logged, and counted among the captures, once in this time.
REFUSAL_S = 60.0
MAX_REFUSALS = 1000


class NotReadyError(Exception):
    """Which ranks run here is not known yet. In one line."""


class Answer(NamedTuple):
    """What became of one alert. outcome: of telemetry.alerts.ALERT_OUTCOMES; detail: for people."""

    fingerprint: str
    outcome: str
    detail: str = ""
    capture_id: str | None = None


class _Wish(NamedTuple):
    """place: of the alert in its webhook."""

    place: int
    alert: Alert
    target: Target


class AlertDesk:
    """``receive`` may be called from any thread.

    What was captured for which alert is known from the capture store, so that a restart of the
    daemon asks for nothing twice. ``node``: how an alert's label ``node`` calls this one; ``clock``
    is the wall clock.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        ranks: RanksSource,
        hub: Hub,
        node: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator = coordinator
        self._ranks = ranks
        self._hub = hub
        self._node = node.lower()
        self._clock = clock
        self._lock = threading.Lock()
        # By the alert's key: when it was heard of last, and its capture.
        self._captured: OrderedDict[str, tuple[float, str]] = OrderedDict()
        # By job and kind: when the last refusal was counted, and its reason.
        self._refused: dict[tuple[str, str], tuple[float, str]] = {}
        for capture in coordinator.captures():
            for key in capture.request.alerts:
                self._remember(key, capture.id)

    def receive(
        self,
        alerts: Sequence[Alert],
        own_names: Iterable[str] = (),
        peers: frozenset[str] = frozenset(),
    ) -> list[Answer]:
        """One answer for each alert, in their order. Waits for the store's disk at most.

        Raises NotReadyError before the ranks have been looked for the first time.
        ``own_names``: what else this node is called, in lower case: the addresses at which
        Prometheus reaches it; ``peers``: those of daemons that can be asked in its place.
        """
        if not self._hub.ranks_known():
            raise NotReadyError("the daemon has not looked for ranks yet")
        with self._lock:
            self._forget()
            state = self._hub.state()
            node = here(state, frozenset({self._node, *own_names}), peers)
            answers: dict[int, Answer] = {}
            groups = self._sort(alerts, state, node, answers)
            for wishes in groups:
                self._ask(wishes, state, answers)
        return [answers[place] for place in range(len(alerts))]

    def _sort(
        self, alerts: Sequence[Alert], state: State, node: Here, answers: dict[int, Answer]
    ) -> Iterable[list[_Wish]]:
        """What is to be captured, together what becomes one request; the rest is answered."""
        groups: dict[tuple[object, ...], list[_Wish]] = {}
        looked_at = 0
        for place, alert in enumerate(alerts):
            looked_at += alert.status == "firing" and alert.key not in self._captured
            try:
                for target in self._targets(alert, looked_at, state, node):
                    group = (target.job, target.kind, target.capture)
                    groups.setdefault(group, []).append(_Wish(place, alert, target))
            except Settled as settled:
                answers[place] = _settled(alert, settled)
        return groups.values()

    def _targets(
        self, alert: Alert, looked_at: int, state: State, node: Here
    ) -> tuple[Target, ...]:
        """Raises Settled."""
        if alert.status == "resolved":
            raise Settled(RESOLVED)
        known = self._captured.get(alert.key)
        if known is not None:
            self._remember(alert.key, known[1])
            raise Settled(DUPLICATE, "it has been captured since it fires", known[1])
        if looked_at > MAX_ALERTS:
            raise Settled(TOO_MANY, f"at most {MAX_ALERTS} alerts of a webhook are looked at")
        targets = targets_of(alert.labels, node)
        for target in targets:
            capture_id = _capture_of_anomaly(target, state)
            if capture_id is not None:
                raise Settled(ALREADY_CAPTURED, f"the {target.kind} has been captured", capture_id)
        return targets

    def _ask(self, wishes: list[_Wish], state: State, answers: dict[int, Answer]) -> None:
        try:
            capture_id = self._request(wishes, state)
        except Settled as settled:
            outcome, detail, found = settled.outcome, str(settled), settled.capture_id
        except Refused as refused:
            reason = NO_RANK if refused.reason == "refused_no_rank" else refused.reason
            outcome, detail, found = reason, str(refused), None
        else:
            outcome, detail, found = CAPTURED, "", capture_id
        for place, alert, _ in wishes:
            # Of a device with several jobs, what was captured is the answer.
            if place not in answers or answers[place].capture_id is None:
                answers[place] = _answer(alert, outcome, detail, found)

    def _request(self, wishes: list[_Wish], state: State) -> str:
        """The capture's id. Raises Settled and Refused."""
        alerts, targets = [wish.alert for wish in wishes], [wish.target for wish in wishes]
        job = targets[0].job
        active = [anomaly for anomaly in state.anomalies if anomaly.end_time is None]
        recipes, local = self._coordinator.policy.config.recipes, self._ranks.targets(job)
        request = request_for(targets, alerts, recipes, local, active)
        same, now = (job, request.anomaly_kind or request.kind), self._clock()
        since, reason = self._refused.get(same, (0.0, None))
        last = reason if now - since < REFUSAL_S else None
        try:
            capture = self._coordinator.request(request, last)
        except Refused as refused:
            if refused.reason != last:
                self._refused[same] = (now, refused.reason)
            raise
        for key in request.alerts:
            self._remember(key, capture.id)
        return capture.id

    def _remember(self, key: str, capture_id: str) -> None:
        self._captured.pop(key, None)
        self._captured[key] = (self._clock(), capture_id)
        if len(self._captured) > MAX_REMEMBERED:
            self._captured.popitem(last=False)

    def _forget(self) -> None:
        horizon = self._clock() - REMEMBER_S
        while self._captured and next(iter(self._captured.values()))[0] < horizon:
            self._captured.popitem(last=False)
        if len(self._refused) > MAX_REFUSALS:
            self._refused.clear()


def _capture_of_anomaly(target: Target, state: State) -> str | None:
    """Of the anomaly that the alert tells of, which its own trigger has had captured."""
    captured = {decision.anomaly_id: decision.capture_id for decision in state.decisions}
    told = [
        captured[anomaly.id]
        for anomaly in state.anomalies
        if anomaly.end_time is None and anomaly.id in captured and _is_of(anomaly, target)
    ]
    return next((capture_id for capture_id in told if capture_id is not None), None)


def _is_of(anomaly: Anomaly, target: Target) -> bool:
    if anomaly.kind != target.kind:
        return False
    if target.device is not None:
        return anomaly.device == target.device
    any_rank = target.ranks is None or anomaly.rank is None
    return anomaly.job == target.job and (any_rank or anomaly.rank in (target.ranks or ()))


def _settled(alert: Alert, settled: Settled) -> Answer:
    return _answer(alert, settled.outcome, str(settled), settled.capture_id)


def _answer(alert: Alert, outcome: str, detail: str, capture_id: str | None) -> Answer:
    return Answer(alert.fingerprint, outcome, detail[:MAX_DETAIL_CHARS], capture_id)
