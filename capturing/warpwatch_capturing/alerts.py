"""Requests one capture per alert of a webhook, and returns the outcome of each alert."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from warpwatch_capturing.config import RecipeConfig
from warpwatch_capturing.participant import RunningRank
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.triggers import is_refused, with_peers
from warpwatch_telemetry import alerts as outcomes
from warpwatch_telemetry.alerts import Alert, AlertAnswer, NotReadyError, host_of
from warpwatch_telemetry.anomalies import KINDS, Anomaly
from warpwatch_telemetry.captures import CAPTURED, NO_RECIPE, Capture, CaptureKind, CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.newest import NewestMap
from warpwatch_telemetry.state import State

# Firing alerts of one webhook that are looked at, beside those captured before: a node has a few,
# and Alertmanager's own ``max_alerts`` can cut beforehand.
MAX_ALERTS = 100
MAX_DETAIL_CHARS = 300
# As long as Alertmanager itself remembers an alert (its --data.retention).
REMEMBER_S = 120 * 3600.0
MAX_REMEMBERED = 4096


class _Wanted(NamedTuple):
    """The request of one alert. number: the place of the alert in its webhook."""

    number: int
    alert: Alert
    target: AlertTarget


class AlertRequests:
    """Requests captures for alerts. ``receive`` may be called from any thread.

    Captures are found in the store, and in the state those of other processes: nothing is requested
    twice. ``state`` returns None until the ranks are known. ``recipes`` returns the
    present ones, which a reload replaces. ``targets``: the live ranks of a job, for healthy peers.
    ``node``: this node's name in the label ``node`` of alerts.
    """

    def __init__(
        self,
        state: Callable[[], State | None],
        request: Callable[[CaptureRequest], Capture],
        register: CaptureRegister,
        recipes: Callable[[], Recipes],
        targets: Callable[[JobId], Mapping[int, RunningRank]],
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
        self._captured: NewestMap[str, tuple[float, str]] = NewestMap(MAX_REMEMBERED)
        for capture in register.all():
            for key in capture.request.alerts:
                self._remember(key, capture.id)

    def receive(self, alerts: Sequence[Alert], own_name: str = "") -> list[AlertAnswer]:
        """Request captures for alerts; return an answer per alert, in the same order.

        ``own_name``: the address at which Prometheus reaches this node. Raises NotReadyError
        before the ranks have been read for the first time.
        """
        state = self._state()
        if state is None:
            raise NotReadyError("the daemon has not looked for ranks yet")
        with self._lock:
            self._learn(one for one in state.captures if not is_refused(one))
            self._forget()
            node = ThisNode(state, {self._node, own_name})
            answers: dict[int, AlertAnswer] = {}
            groups = self._sort(alerts, state, node, answers)
            for wanted in groups:
                self._ask(wanted, state, answers)
        return [answers[number] for number in range(len(alerts))]

    def _sort(
        self, alerts: Sequence[Alert], state: State, node: ThisNode, answers: dict[int, AlertAnswer]
    ) -> Iterable[list[_Wanted]]:
        """Return the alerts to capture, grouped by request; answer the others."""
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
        """Return what to capture for the alert. Raises Settled."""
        if alert.status == "resolved":
            raise Settled(outcomes.RESOLVED)
        capture_id = self._capture_of_alert(alert)
        if capture_id is not None:
            self._remember(alert.key, capture_id)
            raise Settled(outcomes.DUPLICATE, "it has been captured since it fires", capture_id)
        if looked_at > MAX_ALERTS:
            raise Settled(
                outcomes.TOO_MANY, f"at most {MAX_ALERTS} alerts of a webhook are looked at"
            )
        targets = targets_of(alert.labels, node)
        for target in targets:
            capture_id = _capture_of_anomaly(target, state)
            if capture_id is not None:
                raise Settled(
                    outcomes.ALREADY_CAPTURED, f"the {target.kind} has been captured", capture_id
                )
        return targets

    def _ask(self, wanted: list[_Wanted], state: State, answers: dict[int, AlertAnswer]) -> None:
        alerts, targets = [one.alert for one in wanted], [one.target for one in wanted]
        active = [anomaly for anomaly in state.anomalies if anomaly.end_time is None]
        try:
            local = self._local(targets[0].job)
            request = request_for(targets, alerts, self._recipes(), local, active)
            capture = self._request_capture(request)
        except Settled as settled:
            outcome, detail, found = settled.outcome, str(settled), settled.capture_id
        except Refused as refused:
            reason = outcomes.NO_RANK if refused.reason == "refused_no_rank" else refused.reason
            outcome, detail, found = reason, str(refused), None
        else:
            outcome, detail, found = CAPTURED, "", capture.id
            for key in request.alerts:
                self._remember(key, capture.id)
        for number, alert, _ in wanted:
            # A device may have several jobs: the capture of any of them is the answer.
            if number not in answers or answers[number].capture_id is None:
                answers[number] = _answer(alert, outcome, detail, found)

    def _capture_of_alert(self, alert: Alert) -> str | None:
        """Return the capture for this firing, unless it was refused after its start."""
        _, capture_id = self._captured.get(alert.key, (0.0, None))
        capture = None if capture_id is None else self._register.get(capture_id)
        return None if capture is not None and is_refused(capture) else capture_id

    def _learn(self, captures: Iterable[Capture]) -> None:
        for capture in captures:
            for key in capture.request.alerts:
                if key not in self._captured:
                    self._captured[key] = (capture.time, capture.id)

    def _remember(self, key: str, capture_id: str) -> None:
        self._captured[key] = (self._wall(), capture_id)

    def _forget(self) -> None:
        horizon = self._wall() - REMEMBER_S
        for key in [key for key, (at, _) in self._captured.items() if at < horizon]:
            del self._captured[key]


def _capture_of_anomaly(target: AlertTarget, state: State) -> str | None:
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


Recipes = Mapping[str, RecipeConfig | None]

# Without a recipe, named ranks are captured alone.
_PLAIN = RecipeConfig(ranks="culprit")


def request_for(
    targets: Sequence[AlertTarget],
    alerts: Sequence[Alert],
    recipes: Recipes,
    local: Mapping[int, RunningRank],
    active: Iterable[Anomaly],
) -> CaptureRequest:
    """Return one request for targets of one job, kind and capture, with the union of their ranks.

    ``alerts``: the alerts with these targets; ``local``: the job's live ranks here; ``active``:
    all active anomalies. Raises Settled where the kind's recipe is switched off.
    """
    first = targets[0]
    recipe = _recipe(first, recipes)
    return CaptureRequest(
        **first.job.fields(),
        kind=first.capture or recipe.kind,
        trigger="alert",
        ranks=_ranks_of(targets, recipe, local, active),
        steps=recipe.steps,
        options=tuple(sorted(recipe.options)),
        reason=f"alert {alerts[0].name}",
        anomaly_kind=first.kind,
        alerts=tuple(dict.fromkeys(alert.key for alert in alerts)),
    )


def _recipe(target: AlertTarget, recipes: Recipes) -> RecipeConfig:
    if target.capture is not None or target.kind is None or target.kind not in recipes:
        return _PLAIN
    recipe = recipes[target.kind]
    if recipe is None:
        raise Settled(NO_RECIPE, f"triggers.recipes: {target.kind} is switched off")
    return recipe


def _ranks_of(
    targets: Sequence[AlertTarget],
    recipe: RecipeConfig,
    local: Mapping[int, RunningRank],
    active: Iterable[Anomaly],
) -> tuple[int, ...] | None:
    named = [target.ranks for target in targets if target.ranks is not None]
    if recipe.ranks == "all" or len(named) < len(targets):
        return None
    return with_peers(targets[0].job, frozenset[int]().union(*named), recipe, local, active)


# The values of the label ``capture``. Nsight Systems has to run around the program beforehand.
CAPTURES: Mapping[str, CaptureKind] = {"torch": "torch", "stacks": "stacks", "memory": "memory"}
MAX_RANK = 2**31
_GONE = frozenset({"exited", "died"})


class Settled(Exception):
    """Raised if no capture is requested. outcome: of telemetry.alerts.ALERT_OUTCOMES."""

    def __init__(self, outcome: str, detail: str = "", capture_id: str | None = None) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.capture_id = capture_id


@dataclass(frozen=True, slots=True)
class AlertTarget:
    """Ranks of one job. ranks: None for all that are here.

    kind: the kind of the alert's anomaly; capture: the kind of capture that the alert requests;
    device: the UUID for an alert about a device. None if the labels do not tell.
    """

    job: JobId
    ranks: frozenset[int] | None = None
    kind: str | None = None
    capture: CaptureKind | None = None
    device: str | None = None


class ThisNode:
    """The node that captures. own_names: its names in the labels ``node`` and ``instance``.

    jobs: live ranks by job; on_device: (job, rank) by UUID; uuids: by the device's index.
    """

    def __init__(self, state: State, own_names: Set[str]) -> None:
        self.own_names = own_names
        self.jobs: defaultdict[JobId, set[int]] = defaultdict(set)
        self.on_device: defaultdict[str | None, set[tuple[JobId, int]]] = defaultdict(set)
        devices = [one.device for one in state.devices]
        # MIG instances have the index of their GPU.
        self.uuids = {str(one.index): one.uuid for one in devices if not one.gpu_instance}
        parents = {one.uuid: one.info.get("parent_uuid", one.uuid) for one in devices}
        for rank in state.ranks:
            if rank.status not in _GONE:
                self.jobs[rank.job_id].add(rank.rank)
                for device in {rank.device, parents.get(rank.device or "")} - {None}:
                    self.on_device[device].add((rank.job_id, rank.rank))


def targets_of(labels: Mapping[str, str], node: ThisNode) -> tuple[AlertTarget, ...]:
    """Return one target per job; a device may have ranks of several. Raises Settled."""
    kind = labels.get("kind")
    kind = kind if kind in KINDS else None
    asked = labels.get("capture") or None
    if asked is not None and asked not in CAPTURES:
        raise Settled(outcomes.BAD_LABELS, f"capture is one of {', '.join(CAPTURES)}")
    capture = None if asked is None else CAPTURES[asked]
    if labels.get("training_job"):
        job = _job(labels, node)
        return (AlertTarget(job, _ranks(job, labels, node), kind, capture),)
    uuid = _uuid(labels, node)
    found: dict[JobId, set[int]] = {}
    for name, number in node.on_device.get(uuid, ()):
        found.setdefault(name, set()).add(number)
    if not found:
        raise Settled(outcomes.NO_RANK, f"no running rank is known on device {uuid[:64]}")
    return tuple(
        AlertTarget(name, frozenset(numbers), kind, capture, uuid)
        for name, numbers in sorted(found.items())
    )


def _job(labels: Mapping[str, str], node: ThisNode) -> JobId:
    """Return the job that the labels name. Raises Settled."""
    name, owner = labels["training_job"], labels.get("owner", "")
    named = [job for job in node.jobs if job.name == name and owner in ("", job.owner)]
    if not named:
        raise Settled(outcomes.NO_RANK, f"no running rank of job {name[:100]!r} is known here")
    if len(named) > 1:
        owners = ", ".join(sorted(job.owner for job in named))
        detail = f"{name[:100]} is a job of each of {owners}; the label owner says whose"
        raise Settled(outcomes.BAD_LABELS, detail)
    return named[0]


def _ranks(job: JobId, labels: Mapping[str, str], node: ThisNode) -> frozenset[int] | None:
    """Return the named ranks, or None for all that are here. Raises Settled."""
    known, rank = node.jobs[job], labels.get("rank")
    if not rank:
        return None
    if not (rank.isascii() and rank.isdecimal() and len(rank) <= 10 and int(rank) < MAX_RANK):
        raise Settled(outcomes.BAD_LABELS, f"rank {rank[:20]!r} is not a rank number")
    number = int(rank)
    if number not in known:
        raise Settled(outcomes.NO_RANK, f"{job.name[:100]} has no running rank {number} here")
    return frozenset({number})


def _uuid(labels: Mapping[str, str], node: ThisNode) -> str:
    """Return the UUID of the named device; an index is only valid on one node. Raises Settled."""
    if labels.get("uuid"):
        return labels["uuid"]
    index = labels.get("gpu")
    if not index:
        raise Settled(outcomes.IGNORED, "the labels name no training_job, uuid or gpu")
    named = {labels.get("node", "").lower(), host_of(labels.get("instance", ""))} - {""}
    uuid = node.uuids.get(index)
    if uuid is None or (named and not named & node.own_names):
        raise Settled(
            outcomes.NO_RANK, f"gpu {index[:10]!r} without uuid is not a device of this node"
        )
    return uuid
