"""Detectors, one file a kind: records in, verdicts out.

- base: what a detector is, what it sees and what it says
- job_steps: joins the ranks' steps into steps of the job; capture_windows: what to look away from
- level: medians; step_signal, step_work: a job's steps as samples, evened out by their work;
  samples, level_shift, episode, shift_detector: a level that rose, and until when
- rank_levels: each rank's time beside its peers', for straggler; peers, work_scaling: who and how;
  sliding_median, guarded_median, frozen_baseline: statistics; regular_pauses, told_pauses: for
  gc_pause
- deaths: who went first and of what, for crash and oom; pulse, at_rest: what hang remembers and
  the activity that nothing moves; growth: a level that grows without end, for memory_leak
- step_regression, step_drift, step_spikes, comm_slow, data_stall, straggler, gc_pause, hang, crash,
  oom, memory_leak, memory_pressure: the kinds
- devices: the kinds about a device
"""

from __future__ import annotations

from collections.abc import Callable

from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import Detector
from warpwatch_detection.detectors.comm_slow import CommSlow
from warpwatch_detection.detectors.crash import Crash
from warpwatch_detection.detectors.data_stall import DataStall
from warpwatch_detection.detectors.devices import DEVICE_DETECTORS
from warpwatch_detection.detectors.gc_pause import GcPause
from warpwatch_detection.detectors.hang import Hang
from warpwatch_detection.detectors.memory_leak import MemoryLeak
from warpwatch_detection.detectors.memory_pressure import MemoryPressure
from warpwatch_detection.detectors.oom import Oom
from warpwatch_detection.detectors.step_drift import StepDrift
from warpwatch_detection.detectors.step_regression import StepRegression
from warpwatch_detection.detectors.step_spikes import StepSpikes
from warpwatch_detection.detectors.straggler import Straggler

# In the order in which they judge a record: a cause comes before what it explains.
DETECTORS: dict[str, Callable[[DetectionConfig, AnomaliesConfig], Detector]] = {
    **DEVICE_DETECTORS,
    "oom": lambda kinds, _: Oom(kinds.oom),
    "crash": lambda kinds, _: Crash(kinds.crash),
    "memory_leak": lambda kinds, _: MemoryLeak(kinds.memory_leak),
    "memory_pressure": lambda kinds, _: MemoryPressure(kinds.memory_pressure),
    "hang": lambda kinds, _: Hang(kinds.hang),
    "data_stall": lambda kinds, _: DataStall(kinds.data_stall),
    "gc_pause": lambda kinds, _: GcPause(kinds.gc_pause),
    "straggler": lambda kinds, _: Straggler(kinds.straggler),
    "step_spikes": lambda kinds, _: StepSpikes(kinds.step_spikes),
    "comm_slow": lambda kinds, _: CommSlow(kinds.comm_slow),
    "step_regression": lambda kinds, _: StepRegression(kinds.step_regression),
    "step_drift": lambda kinds, _: StepDrift(kinds.step_drift),
}


def build(kinds: DetectionConfig, anomalies: AnomaliesConfig) -> list[Detector]:
    """The enabled detectors."""
    return [
        make(kinds, anomalies) for kind, make in DETECTORS.items() if getattr(kinds, kind).enabled
    ]
