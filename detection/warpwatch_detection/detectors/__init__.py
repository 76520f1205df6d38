"""Detectors by kind: observations in, results out.

- rises (step_regression, step_drift, comm_slow), step_spikes, data_stall, straggler, gc_pause:
  kinds about the steps of a job
- run_regression: a run against the job's earlier ones
- hang: a job that stands still; step_progress: its memory of steps and activity
- deaths: crash and oom: the rank that failed first, and its cause
- memory: memory_leak, memory_pressure
- serving: the kinds that only inference servers have
- devices: the kinds about a device
"""

from __future__ import annotations

from collections.abc import Callable

from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import Detector
from warpwatch_detection.detectors.data_stall import DataStall
from warpwatch_detection.detectors.deaths import Crash, Oom
from warpwatch_detection.detectors.devices import availability, clocks, errors, links
from warpwatch_detection.detectors.gc_pause import GcPause
from warpwatch_detection.detectors.hang import Hang
from warpwatch_detection.detectors.memory import MemoryLeak, MemoryPressure
from warpwatch_detection.detectors.rises import CommSlow, StepDrift, StepRegression
from warpwatch_detection.detectors.run_regression import RunRegression
from warpwatch_detection.detectors.serving.latency_regression import LatencyRegression
from warpwatch_detection.detectors.serving.overload import KvThrash, QueueGrowth
from warpwatch_detection.detectors.step_spikes import StepSpikes
from warpwatch_detection.detectors.straggler import Straggler
from warpwatch_detection.ranks import RankDevices

# ``RankDevices`` is kept up to date by the engine.
MakeDetector = Callable[[DetectionConfig, AnomaliesConfig, RankDevices], Detector]
# In the order in which they evaluate a record: a cause comes before what it explains.
DETECTORS: dict[str, MakeDetector] = {
    "device_needs_service": lambda *_: availability.DeviceNeedsService(),
    "device_lost": lambda *_: availability.DeviceLost(),
    "device_stuck": lambda *_: availability.DeviceStuck(),
    "xid": lambda kinds, anomalies, _: errors.XidErrors(kinds.xid, anomalies.hold_s),
    "ecc_uncorrectable": lambda _, anomalies, __: errors.EccUncorrectable(anomalies.hold_s),
    "row_remap": lambda _, anomalies, __: errors.RowRemap(anomalies.hold_s),
    "thermal_throttle": lambda *_: clocks.ThermalThrottle(),
    "power_brake": lambda *_: clocks.PowerBrake(),
    "clock_drop": lambda *_: clocks.ClockDrop(),
    "pcie_degraded": lambda *_: links.PcieDegraded(),
    "nvlink_error": lambda *_: links.NvlinkError(),
    "network_link_down": lambda *_: links.NetworkLinkDown(),
    "network_errors": lambda *_: links.NetworkErrors(),
    "device_idle": lambda kinds, _, ranks: availability.DeviceIdle(kinds.device_idle, ranks),
    "overheating": lambda *_: clocks.Overheating(),
    "oom": lambda *_: Oom(),
    "crash": lambda *_: Crash(),
    "memory_leak": lambda _, __, ranks: MemoryLeak(ranks),
    "memory_pressure": lambda _, __, ranks: MemoryPressure(ranks),
    "hang": lambda kinds, _, ranks: Hang(kinds.hang, ranks),
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
    wanted = (make for kind, make in DETECTORS.items() if kind not in kinds.disabled)
    return [make(kinds, anomalies, ranks) for make in wanted]
