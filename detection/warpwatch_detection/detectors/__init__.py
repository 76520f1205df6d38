"""Detectors by kind: observations in, results out.

- level_shifts (step_regression, comm_slow), step_drift, step_spikes, data_stall, straggler,
  gc_pause: kinds about the steps of a job
- run_regression: a run against the job's earlier ones
- hang: a job that stands still; step_progress: what it remembers of steps and activity
- deaths: crash and oom, which rank failed first and why
- memory_leak, memory_pressure: kinds about the memory of ranks and devices
- serving: the kinds that only inference servers have
- devices: the kinds about a device
"""

from __future__ import annotations

from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import Detector
from warpwatch_detection.detectors.data_stall import DataStall
from warpwatch_detection.detectors.deaths import Crash, Oom
from warpwatch_detection.detectors.devices import DEVICE_DETECTORS, MakeDetector
from warpwatch_detection.detectors.gc_pause import GcPause
from warpwatch_detection.detectors.hang import Hang
from warpwatch_detection.detectors.level_shifts import CommSlow, StepRegression
from warpwatch_detection.detectors.memory_leak import MemoryLeak
from warpwatch_detection.detectors.memory_pressure import MemoryPressure
from warpwatch_detection.detectors.run_regression import RunRegression
from warpwatch_detection.detectors.serving.kv_thrash import KvThrash
from warpwatch_detection.detectors.serving.latency_regression import LatencyRegression
from warpwatch_detection.detectors.serving.queue_growth import QueueGrowth
from warpwatch_detection.detectors.step_drift import StepDrift
from warpwatch_detection.detectors.step_spikes import StepSpikes
from warpwatch_detection.detectors.straggler import Straggler
from warpwatch_detection.ranks import RankDevices

# In the order in which they evaluate a record: a cause comes before what it explains.
DETECTORS: dict[str, MakeDetector] = {
    **DEVICE_DETECTORS,
    "oom": lambda *_: Oom(),
    "crash": lambda *_: Crash(),
    "memory_leak": lambda _, __, ranks: MemoryLeak(ranks),
    "memory_pressure": lambda *_: MemoryPressure(),
    "hang": lambda kinds, *_: Hang(kinds.hang),
    "data_stall": lambda kinds, *_: DataStall(kinds.false_alarms_per_job_day),
    "gc_pause": lambda kinds, *_: GcPause(kinds.false_alarms_per_job_day),
    "straggler": lambda kinds, *_: Straggler(kinds.false_alarms_per_job_day),
    "step_spikes": lambda kinds, *_: StepSpikes(kinds.false_alarms_per_job_day),
    "comm_slow": lambda kinds, *_: CommSlow(kinds.false_alarms_per_job_day),
    "step_regression": lambda kinds, *_: StepRegression(kinds.false_alarms_per_job_day),
    "step_drift": lambda kinds, *_: StepDrift(kinds.false_alarms_per_job_day),
    "run_regression": lambda *_: RunRegression(),
    "kv_thrash": lambda *_: KvThrash(),
    "queue_growth": lambda *_: QueueGrowth(),
    "latency_regression": lambda kinds, *_: LatencyRegression(kinds.false_alarms_per_job_day),
}


def build(kinds: DetectionConfig, anomalies: AnomaliesConfig, ranks: RankDevices) -> list[Detector]:
    """Return the detectors that are not disabled."""
    wanted = (make for kind, make in DETECTORS.items() if kind not in kinds.disabled)
    return [make(kinds, anomalies, ranks) for make in wanted]
