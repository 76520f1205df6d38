"""Decides which active anomaly is the cause of a finding.

A finding about a job is explained by another kind of the same job (``EXPLAINED_BY``), or by a fault
of the device that its rank runs on (``DEVICE_CAUSES``). If the whole job has stopped, any of its
devices can be the cause, but only a critical fault that is new, and no XID that the program caused
itself. If the whole job is slow, half of its devices must be at fault: one slow device is one slow
rank. A finding about a device is explained by its job (``JOB_CAUSES``), or by the same fault in
another form (``SAME_FAULT``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from warpwatch_detection.anomalies.tracked import Key, TrackedAnomaly
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import EVENT_KINDS, Anomaly, Detected
from warpwatch_telemetry.xids import MEMORY_XIDS, explain

# These stop or delay a rank: the whole job waits for it.
_DELAYS = ("hang", "crash", "oom", "straggler", "data_stall")
_SERVER = ("hang", "crash", "oom", "straggler", "step_regression")
_SPIKES = (*_DELAYS, "gc_pause", "comm_slow", "step_spikes")

# While one of these is active on the job, it is the cause and the kind is only its effect.
EXPLAINED_BY: Mapping[str, tuple[str, ...]] = {
    "step_regression": (*_SPIKES, "step_drift"),
    "step_drift": (*_SPIKES, "step_regression"),
    "step_spikes": (*_DELAYS, "gc_pause"),
    "run_regression": (*_SPIKES, "step_drift", "step_regression"),
    "comm_slow": (*_DELAYS, "step_spikes"),
    "kv_thrash": ("hang", "crash", "oom"),
    "queue_growth": (*_SERVER, "kv_thrash"),
    "latency_regression": (*_SERVER, "kv_thrash", "queue_growth"),
}

_SLOW = ("thermal_throttle", "power_brake", "clock_drop", "pcie_degraded", "nvlink_error")
_FAILED = ("device_lost", "device_stuck", "xid", "ecc_uncorrectable")

# Faults of a rank's device that explain what is found about the rank or its job.
DEVICE_CAUSES: Mapping[str, tuple[str, ...]] = {
    "straggler": _SLOW,
    "step_regression": _SLOW,
    "step_drift": _SLOW,
    "step_spikes": _SLOW,
    "run_regression": _SLOW,
    "comm_slow": ("nvlink_error", "pcie_degraded"),
    "latency_regression": _SLOW,
    "hang": (*_FAILED, "nvlink_error"),
    "crash": (*_FAILED, "nvlink_error"),
}

# Faults of any network port of a node that explain what is found about a job of several nodes.
NETWORK_CAUSES: Mapping[str, tuple[str, ...]] = {
    "comm_slow": ("network_link_down", "network_errors"),
    "hang": ("network_link_down",),
    "crash": ("network_link_down",),
}

# One fault of a device in several forms. A memory error: as an XID (only those that are about
# memory), in the ECC counters, and as rows taken out of use. Heat: as temperature and clock.
SAME_FAULT: Mapping[str, tuple[str, ...]] = {
    "ecc_uncorrectable": ("xid",),
    "row_remap": ("xid", "ecc_uncorrectable"),
    "overheating": ("thermal_throttle",),
    "clock_drop": ("thermal_throttle",),
}

# Findings about a job that explain that nothing runs on its devices.
JOB_CAUSES: Mapping[str, tuple[str, ...]] = {"device_idle": ("hang", "crash", "data_stall")}

# All ranks wait for the rank whose device fails.
_STOPPED = frozenset({"hang", "crash"})
# A fault that began longer before the stop has let the job run until then.
NEW_FAULT_S = 3600.0

Active = Mapping[Key, TrackedAnomaly]


def cause_of(
    key: Key, found: Detected, active: Active, ranks: RankDevices
) -> TrackedAnomaly | None:
    """Return the active anomaly that explains what was found about a job or device."""
    kind, job, device = key
    if kind in _STOPPED:
        active = {key: one for key, one in active.items() if _may_stop(one.anomaly, kind, found)}
    if job is None and kind in SAME_FAULT:
        memory = {key: known for key, known in active.items() if _is_of_memory(known.anomaly)}
        return _first(memory, ((cause, None, device) for cause in SAME_FAULT[kind]))
    if job is None:
        jobs = {job for job, _ in ranks.on(device)} if kind in JOB_CAUSES and device else ()
        return _first(active, ((cause, job, None) for job in jobs for cause in JOB_CAUSES[kind]))
    # A rank that may only have more work explains no other finding.
    sure = {key: known for key, known in active.items() if known.anomaly.severity != "info"}
    own = _first(sure, ((cause, job, device) for cause in EXPLAINED_BY.get(kind, ())))
    if own is None and ranks.spans_nodes(job):
        causes = NETWORK_CAUSES.get(kind, ())
        own = next((known for key, known in active.items() if key[0] in causes), None)
    if own is not None or kind not in DEVICE_CAUSES:
        return own
    devices = ranks.devices(job) if found.rank is None else {ranks.device(job, found.rank)}
    needed = 1 if kind in _STOPPED else len(devices) / 2
    return _device_cause(DEVICE_CAUSES[kind], devices, needed, active)


def _may_stop(fault: Anomaly, kind: str, found: Detected) -> bool:
    """Return whether a fault is severe and new enough to stop a job as it was found."""
    # A hang began with the silence that is its value.
    stop_time = found.time - ((found.value or 0.0) if kind == "hang" else 0.0)
    is_new = fault.kind in EVENT_KINDS or stop_time - fault.time < NEW_FAULT_S
    # A stop of severity info seems to be on purpose, so any fault explains it better.
    is_able = found.severity == "info" or fault.severity == "critical"
    return is_new and is_able and not _is_own(fault)


def _is_own(fault: Anomaly) -> bool:
    """Return whether the program caused the fault itself."""
    if fault.kind != "xid" or fault.value is None:
        return False
    return explain(int(fault.value)).blame == "application"


def _is_of_memory(fault: Anomaly) -> bool:
    return fault.kind != "xid" or fault.value in MEMORY_XIDS


def _device_cause(
    causes: Iterable[str], devices: Collection[str | None], needed: float, active: Active
) -> TrackedAnomaly | None:
    """Return the first of the devices' faults, if enough of the devices have one."""
    keys = [[(cause, None, device) for cause in causes] for device in devices if device is not None]
    faults = [fault for of_device in keys if (fault := _first(active, of_device))]
    if not faults or len(faults) < needed:
        return None
    return min(faults, key=lambda tracked: tracked.anomaly.time)


def _first(active: Active, keys: Iterable[Key]) -> TrackedAnomaly | None:
    return next((known for key in keys if (known := active.get(key))), None)
