"""Which active anomaly is the cause of what is found.

A kind of a job is explained by another kind of the same job (``EXPLAINED_BY``), or by a fault of
the device that its rank runs on (``DEVICE_CAUSES``). Of a finding about a job as a whole, any of
its devices is the cause if it stopped the job; if the job is slow, half of them must be at fault:
one slow device is one slow rank. What stops a job is explained only by a critical fault, and by no
XID that a program brings on itself. What is found about a device is explained by what its job does
(``JOB_CAUSES``), or by the same fault seen in another way (``SAME_FAULT``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from warpwatch_detection.anomalies.causes import (
    DEVICE_CAUSES,
    EXPLAINED_BY,
    JOB_CAUSES,
    NETWORK_CAUSES,
    SAME_FAULT,
)
from warpwatch_detection.anomalies.rank_devices import RankDevices
from warpwatch_detection.anomalies.register_state import Key, TrackedAnomaly
from warpwatch_telemetry.anomalies import Anomaly, Severity
from warpwatch_telemetry.xids import MEMORY_XIDS, explain

# All ranks wait for the one whose device fails.
_STOPPED = frozenset({"hang", "crash"})

Active = Mapping[Key, TrackedAnomaly]


def cause_of(
    key: Key, rank: int | None, severity: Severity, active: Active, ranks: RankDevices
) -> TrackedAnomaly | None:
    """The active anomaly that explains a finding of this kind about this job, rank or device."""
    kind, job, device = key
    if job is None and kind in SAME_FAULT:
        memory = {of: known for of, known in active.items() if _is_of_memory(known.anomaly)}
        return _first(memory, ((cause, None, device) for cause in SAME_FAULT[kind]))
    if job is None:
        jobs = ranks.jobs_on(device) if kind in JOB_CAUSES and device is not None else ()
        return _first(active, ((cause, of, None) for of in jobs for cause in JOB_CAUSES[kind]))
    # A rank that perhaps only has more work explains nothing that comes later.
    sure = {of: known for of, known in active.items() if known.anomaly.severity != "info"}
    own = _first(sure, ((cause, job, device) for cause in EXPLAINED_BY.get(kind, ())))
    if own is None and ranks.spans_nodes(job):
        own = next(
            (known for of, known in active.items() if of[0] in NETWORK_CAUSES.get(kind, ())), None
        )
    if own is not None or kind not in DEVICE_CAUSES:
        return own
    devices = ranks.devices(job) if rank is None else {ranks.device(job, rank)}
    if kind in _STOPPED:
        # Ended on purpose, as far as anyone can tell: any fault is the better word.
        faults = active if severity == "info" else _critical(active)
        able = {of: known for of, known in faults.items() if not _is_own(known.anomaly)}
        return _device_cause(DEVICE_CAUSES[kind], devices, 1, able)
    return _device_cause(DEVICE_CAUSES[kind], devices, len(devices) / 2, active)


def _critical(active: Active) -> Active:
    return {key: known for key, known in active.items() if known.anomaly.severity == "critical"}


def _is_own(fault: Anomaly) -> bool:
    """Whether the program brought the fault on itself."""
    if fault.kind != "xid" or fault.value is None:
        return False
    return explain(int(fault.value)).blame == "application"


def _is_of_memory(fault: Anomaly) -> bool:
    return fault.kind != "xid" or fault.value in MEMORY_XIDS


def _device_cause(
    causes: Iterable[str], devices: Collection[str | None], needed: float, active: Active
) -> TrackedAnomaly | None:
    """The first of the devices' faults, if enough of the devices have one."""
    faults = {
        device: fault
        for device in devices
        if device is not None
        and (fault := _first(active, ((cause, None, device) for cause in causes)))
    }
    if not faults or len(faults) < needed:
        return None
    return min(faults.values(), key=lambda tracked: tracked.anomaly.time)


def _first(active: Active, keys: Iterable[Key]) -> TrackedAnomaly | None:
    return next((known for key in keys if (known := active.get(key))), None)
