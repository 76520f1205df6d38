"""Which kind of anomaly is the cause of which other."""

from __future__ import annotations

from collections.abc import Mapping

# What stops or delays a rank: the whole job waits for it.
_DELAYS = ("hang", "crash", "oom", "straggler", "data_stall")

# While one of these is active on the job, it is the cause and the other only its effect.
EXPLAINED_BY: Mapping[str, tuple[str, ...]] = {
    "step_regression": (*_DELAYS, "gc_pause", "comm_slow", "step_spikes", "step_drift"),
    "step_drift": (*_DELAYS, "gc_pause", "comm_slow", "step_spikes", "step_regression"),
    "step_spikes": (*_DELAYS, "gc_pause"),
    "run_regression": (
        *(*_DELAYS, "gc_pause", "comm_slow", "step_spikes", "step_drift", "step_regression"),
    ),
    "comm_slow": (*_DELAYS, "step_spikes"),
}

_SLOW = ("thermal_throttle", "power_brake", "clock_drop", "pcie_degraded", "nvlink_error")
_FAILED = ("device_lost", "device_stuck", "xid", "ecc_uncorrectable")

# What on a rank's device explains what is found about the rank or its job.
DEVICE_CAUSES: Mapping[str, tuple[str, ...]] = {
    "straggler": _SLOW,
    "step_regression": _SLOW,
    "step_drift": _SLOW,
    "step_spikes": _SLOW,
    "run_regression": _SLOW,
    "comm_slow": ("nvlink_error", "pcie_degraded"),
    "hang": (*_FAILED, "nvlink_error"),
    "crash": (*_FAILED, "nvlink_error"),
}

# What on any network port of a node explains what is found about a job of several nodes.
NETWORK_CAUSES: Mapping[str, tuple[str, ...]] = {
    "comm_slow": ("network_link_down", "network_errors"),
    "hang": ("network_link_down",),
    "crash": ("network_link_down",),
}

# One fault of a device that shows in several ways. A memory error: as an XID (only those that are
# about memory), in the ECC counters, and as rows taken out of use. Heat: as temperature and clock.
SAME_FAULT: Mapping[str, tuple[str, ...]] = {
    "ecc_uncorrectable": ("xid",),
    "row_remap": ("xid", "ecc_uncorrectable"),
    "overheating": ("thermal_throttle",),
    "clock_drop": ("thermal_throttle",),
}

# What is found about a job explains that nothing runs on its devices.
JOB_CAUSES: Mapping[str, tuple[str, ...]] = {
    "device_idle": ("hang", "crash", "data_stall"),
}

# Their evidence is of hundreds of steps: what began before such a cause ended is its effect, too.
LONG_EVIDENCE = frozenset({"step_spikes"})

# Found once, however long they last: not again when their cause is over.
FOUND_ONCE = frozenset({"hang", "crash", "oom", "memory_leak", "memory_pressure"})
