"""Which ranks an alert is about, by its labels and what runs on this node."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from warpwatch_telemetry.alerts import BAD_LABELS, IGNORED, NO_RANK, host_of
from warpwatch_telemetry.anomalies import KINDS
from warpwatch_telemetry.captures import CaptureKind
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import State

# What the label ``capture`` may say. Nsight Systems has to run around the program beforehand.
CAPTURES: Mapping[str, CaptureKind] = {"torch": "torch", "stacks": "stacks", "memory": "memory"}
MAX_RANK = 2**31
_GONE = frozenset({"exited", "died"})


class Settled(Exception):
    """Nothing is asked for. outcome: of telemetry.alerts.ALERT_OUTCOMES."""

    def __init__(self, outcome: str, detail: str = "", capture_id: str | None = None) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.capture_id = capture_id


@dataclass(frozen=True, slots=True)
class AlertTarget:
    """Ranks of one job. ranks: None for all that are here.

    kind: of the anomaly that the alert is about; capture: what the alert itself asks for; device:
    the UUID, where the alert is about a device. None where the labels say nothing of it.
    """

    job: JobId
    ranks: frozenset[int] | None = None
    kind: str | None = None
    capture: CaptureKind | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class ThisNode:
    """own_names: what an alert's ``node`` and ``instance`` may call it.

    jobs: live ranks by job; on_device: (job, rank) by
    UUID; uuids: by the device's index.
    """

    own_names: frozenset[str]
    jobs: Mapping[JobId, Set[int]]
    on_device: Mapping[str, Set[tuple[JobId, int]]]
    uuids: Mapping[str, str]


def this_node(state: State, own_names: frozenset[str]) -> ThisNode:
    jobs: dict[JobId, set[int]] = {}
    on_device: dict[str, set[tuple[JobId, int]]] = {}
    for rank in state.ranks:
        if rank.status in _GONE:
            continue
        jobs.setdefault(rank.job_id, set()).add(rank.rank)
        if rank.device is not None:
            on_device.setdefault(rank.device, set()).add((rank.job_id, rank.rank))
    uuids = {str(sample.device.index): sample.device.uuid for sample in state.devices}
    return ThisNode(own_names, jobs, on_device, uuids)


def targets_of(labels: Mapping[str, str], node: ThisNode) -> tuple[AlertTarget, ...]:
    """One a job: a device may have ranks of several. Raises Settled."""
    kind = labels.get("kind")
    kind = kind if kind in KINDS else None
    asked = labels.get("capture") or None
    if asked is not None and asked not in CAPTURES:
        raise Settled(BAD_LABELS, f"capture is one of {', '.join(CAPTURES)}")
    capture = None if asked is None else CAPTURES[asked]
    if labels.get("training_job"):
        job = _job(labels, node)
        return (AlertTarget(job, _ranks(job, labels, node), kind, capture),)
    uuid = _uuid(labels, node)
    found: dict[JobId, set[int]] = {}
    for name, number in node.on_device.get(uuid, ()):
        found.setdefault(name, set()).add(number)
    if not found:
        raise Settled(NO_RANK, f"no running rank is known on device {uuid[:64]}")
    return tuple(
        AlertTarget(name, frozenset(numbers), kind, capture, uuid)
        for name, numbers in sorted(found.items())
    )


def _job(labels: Mapping[str, str], node: ThisNode) -> JobId:
    """The one that runs here by that name, of the owner if one is named. Raises Settled."""
    name, owner = labels["training_job"], labels.get("owner", "")
    named = [job for job in node.jobs if job.name == name and owner in ("", job.owner)]
    if not named:
        raise Settled(NO_RANK, f"no running rank of job {name[:100]!r} is known here")
    if len(named) > 1:
        owners = ", ".join(sorted(job.owner for job in named))
        detail = f"{name[:100]} is a job of each of {owners}; the label owner says whose"
        raise Settled(BAD_LABELS, detail)
    return named[0]


def _ranks(job: JobId, labels: Mapping[str, str], node: ThisNode) -> frozenset[int] | None:
    """Those that are named; None: all that are here. Raises Settled."""
    known, rank = node.jobs[job], labels.get("rank")
    if not rank:
        return None
    if not (rank.isascii() and rank.isdecimal() and len(rank) <= 10 and int(rank) < MAX_RANK):
        raise Settled(BAD_LABELS, f"rank {rank[:20]!r} is no number of a rank")
    number = int(rank)
    if number not in known:
        raise Settled(NO_RANK, f"{job.name[:100]} has no running rank {number} here")
    return frozenset({number})


def _uuid(labels: Mapping[str, str], node: ThisNode) -> str:
    """Of the device that the labels name. An index means something on one node only."""
    if labels.get("uuid"):
        return labels["uuid"]
    index = labels.get("gpu")
    if not index:
        raise Settled(IGNORED, "the labels name no training_job, uuid or gpu")
    named = {labels.get("node", "").lower(), host_of(labels.get("instance", ""))} - {""}
    uuid = node.uuids.get(index)
    if uuid is None or (named and not named & node.own_names):
        raise Settled(NO_RANK, f"gpu {index[:10]!r} without uuid is no device of this node")
    return uuid
