"""Which kinds of a job are only the shadow of which others."""

from __future__ import annotations

from collections.abc import Mapping

# What stops or delays a rank: the whole job waits for it.
_DELAYS = ("hang", "crash", "oom", "straggler", "data_stall")

# Found once, however long they last: nobody tells of them again when their cause is over.
FOUND_ONCE = frozenset({"hang", "crash", "oom", "memory_leak", "memory_pressure"})

# While one of these is active on the job, it is the cause and the other only its shadow.
EXPLAINED_BY: Mapping[str, tuple[str, ...]] = {
    "step_regression": (*_DELAYS, "gc_pause", "comm_slow", "step_spikes", "step_drift"),
    "step_drift": (*_DELAYS, "gc_pause", "comm_slow", "step_spikes", "step_regression"),
    "step_spikes": (*_DELAYS, "gc_pause"),
    "comm_slow": (*_DELAYS, "step_spikes"),
}
