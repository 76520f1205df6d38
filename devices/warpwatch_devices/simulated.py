"""Simulates GPUs from physics, so that the whole daemon runs without one.

Power follows the load, temperature follows power with a delay, energy is power over time, clocks
fall with load, power and heat. Counters only rise. A device's name and labels show what it is.
"""

from __future__ import annotations

import csv
import math
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from warpwatch_devices.config import SimulatedConfig
from warpwatch_devices.source import Sink, Source
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.catalogue import (
    CLOCK_DOMAINS,
    ECC_LOCATIONS,
    NVLINK_ERRORS,
    PCIE_ERRORS,
    REMAP_AVAILABILITIES,
    THROTTLE_REASONS,
    TIMED_THROTTLE_REASONS,
    VIOLATION_POLICIES,
)
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import (
    Attribution,
    Device,
    DeviceProcess,
    DeviceSample,
    HostSample,
    SourceHealth,
    Workload,
)

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Profile:
    """A GPU model's abilities, from NVIDIA's data sheets; rates in bytes per second."""

    name: str
    architecture: str
    memory_gib: int
    idle_w: float
    limit_w: float
    limit_min_w: float
    graphics_hz: float
    memory_hz: float
    slowdown_c: float
    pcie_generation: int
    pcie_rate: float
    nvlinks: int
    nvlink_rate: float


def _profiles() -> dict[str, Profile]:
    with Path(__file__).with_name("simulated_gpus.csv").open(newline="", encoding="utf-8") as file:
        rows = {row.pop("profile"): row for row in csv.DictReader(file)}
    return msgspec.convert(rows, dict[str, Profile], strict=False)


PROFILES = _profiles()


_NAMESPACE = uuid.UUID("a3c1b0f2-6f6e-4d0e-9f4b-2b0a57a7c001")

# Time constants: the driver's power reading is a mean of about a second; a heat sink takes longer.
POWER_TIME_S = 1.0
THERMAL_TIME_S = 25.0
AMBIENT_C = 27.0
FULL_LOAD_C = 66.0
POWER_CAP_SHARE = 0.98
# A process sees a little less than what the driver reports as used.
CONTEXT_BYTES = 512 * 2**20
_WAYS = ("pcie_receive", "pcie_transmit", "nvlink_receive", "nvlink_transmit")


def simulated_uuid(index: int) -> str:
    """Return the UUID of simulated device ``index``, the same in every run."""
    return f"GPU-{uuid.uuid5(_NAMESPACE, str(index))}"


class SimulatedDevice:
    """One device; ``advance`` lets time pass and reads it."""

    def __init__(self, index: int, profile: Profile) -> None:
        self._profile = profile
        self._random = random.Random(index)
        self._temperature_c = AMBIENT_C + 4 + index % 4
        self._power_w = profile.idle_w
        self._energy_j = 0.0
        self._busy_s = 0.0
        self._moved = dict.fromkeys(_WAYS, 0.0)
        self._rates = dict.fromkeys(_WAYS, 0.0)
        self._throttled_s = dict.fromkeys(THROTTLE_REASONS, 0.0)
        self.device = Device(
            uuid=simulated_uuid(index),
            index=index,
            name=f"{profile.name} (simulated)",
            info={
                "simulated": "true",
                "driver_version": "simulated",
                "architecture": profile.architecture,
                "pci_bus_id": f"00000000:{0x18 + index:02X}:00.0",
                "vbios_version": "simulated",
                "serial": f"{index:013d}",
            },
        )

    def advance(self, time: float, elapsed_s: float, load: float | None) -> DeviceSample:
        """Read after ``elapsed_s`` under ``load`` (0 to 1, None: no rank uses the device)."""
        activity = 0.0 if load is None else min(1.0, max(0.0, load))
        if activity:
            activity = min(1.0, max(0.0, activity + self._random.uniform(-0.02, 0.02)))
        self._heat(elapsed_s, activity)
        reasons = self._throttling(activity)
        self._count(elapsed_s, activity, reasons)
        used = 0 if load is None else int(self._profile.memory_gib * _GIB * 0.6)
        values: dict[SeriesKey, float] = {}
        for part in (
            self._activity(activity),
            self._memory(used),
            self._power(),
            self._clocks(activity, reasons),
            self._links(load is not None),
            _MODES,
            _NO_ERRORS,
        ):
            values |= part
        processes: tuple[DeviceProcess, ...] = ()
        if load is not None:
            # No process has PID 0, so nothing can be mistaken for this one.
            share = round(activity, 3)
            processes = (DeviceProcess(0, "simulated", used - CONTEXT_BYTES, share),)
        return DeviceSample(self.device, time, values, processes=processes, source="simulated")

    def _heat(self, elapsed_s: float, activity: float) -> None:
        profile = self._profile
        span_w = profile.limit_w - profile.idle_w
        # Power rises steeply with the first load and flattens: activity is time, not intensity.
        wanted_w = profile.idle_w + span_w * activity**0.7 * 0.97
        before_w = self._power_w
        self._power_w += (wanted_w - before_w) * (1 - math.exp(-elapsed_s / POWER_TIME_S))
        self._energy_j += (before_w + self._power_w) / 2 * elapsed_s
        share = self._power_w / profile.limit_w
        wanted_c = AMBIENT_C + (FULL_LOAD_C - AMBIENT_C) * share + self.device.index % 4
        self._temperature_c += (wanted_c - self._temperature_c) * (
            1 - math.exp(-elapsed_s / THERMAL_TIME_S)
        )

    def _throttling(self, activity: float) -> frozenset[str]:
        reasons = set()
        if not activity:
            reasons.add("idle")
        if self._power_w >= POWER_CAP_SHARE * self._profile.limit_w:
            reasons.add("sw_power_cap")
        if self._temperature_c >= self._profile.slowdown_c:
            reasons.add("sw_thermal")
        return frozenset(reasons)

    def _count(self, elapsed_s: float, activity: float, reasons: frozenset[str]) -> None:
        self._busy_s += activity * elapsed_s
        for reason in reasons:
            self._throttled_s[reason] += elapsed_s
        pcie = self._profile.pcie_rate * elapsed_s * activity
        nvlink = self._profile.nvlink_rate * elapsed_s * activity
        moved = {
            "pcie_receive": 0.06 * pcie,
            "pcie_transmit": 0.02 * pcie,
            "nvlink_receive": 0.3 * nvlink,
            "nvlink_transmit": 0.3 * nvlink,
        }
        for way, moved_bytes in moved.items():
            self._moved[way] += moved_bytes
            self._rates[way] = moved_bytes / elapsed_s if elapsed_s else 0.0

    def _activity(self, activity: float) -> dict[SeriesKey, float]:
        shares: dict[tuple[str, ...], float] = {
            ("utilization",): activity,
            ("memory_utilization",): 0.6 * activity,
            ("encoder_utilization",): 0.0,
            ("decoder_utilization",): 0.0,
            ("jpeg_utilization",): 0.0,
            ("ofa_utilization",): 0.0,
            ("graphics_active",): activity,
            ("sm_active",): 0.85 * activity,
            ("sm_occupancy",): 0.42 * activity,
            ("tensor_active",): 0.38 * activity,
            ("dram_active",): 0.45 * activity,
            ("tensor_type_active", "dfma"): 0.0,
            ("tensor_type_active", "hmma"): 0.38 * activity,
            ("tensor_type_active", "imma"): 0.0,
            ("pipe_active", "fp64"): 0.0,
            ("pipe_active", "fp32"): 0.2 * activity,
            ("pipe_active", "fp16"): 0.05 * activity,
            ("pipe_active", "integer"): 0.15 * activity,
        }
        values: dict[SeriesKey, float] = {
            (f"device_{name}_ratio", tuple(own)): round(share, 3)
            for (name, *own), share in shares.items()
        }
        values["device_busy_seconds_total", ()] = round(self._busy_s, 3)
        return values

    def _memory(self, used: int) -> dict[SeriesKey, float]:
        total = self._profile.memory_gib * _GIB
        reserved, bar1_used = total // 128, 2 * 2**20
        return {
            ("device_memory_total_bytes", ()): total,
            ("device_memory_reserved_bytes", ()): reserved,
            ("device_memory_used_bytes", ()): used,
            ("device_memory_free_bytes", ()): total - reserved - used,
            ("device_bar1_memory_total_bytes", ()): total * 2,
            ("device_bar1_memory_used_bytes", ()): bar1_used,
            ("device_bar1_memory_free_bytes", ()): total * 2 - bar1_used,
        }

    def _power(self) -> dict[SeriesKey, float]:
        profile = self._profile
        power_w = round(self._power_w, 3)
        temperature_c = round(self._temperature_c)
        thresholds = {
            "shutdown": profile.slowdown_c + 5,
            "slowdown": profile.slowdown_c,
            "memory_max": profile.slowdown_c + 8,
            "gpu_max": profile.slowdown_c - 2,
        }
        values: dict[SeriesKey, float] = {
            ("device_power_watts", ()): power_w,
            ("device_power_instant_watts", ()): power_w,
            ("device_power_limit_watts", ()): profile.limit_w,
            ("device_power_limit_default_watts", ()): profile.limit_w,
            ("device_power_limit_min_watts", ()): profile.limit_min_w,
            ("device_power_limit_max_watts", ()): profile.limit_w,
            ("device_energy_joules_total", ()): round(self._energy_j, 3),
            ("device_temperature_celsius", ("gpu",)): temperature_c,
            ("device_temperature_celsius", ("memory",)): temperature_c + 6,
            ("device_temperature_margin_celsius", ()): profile.slowdown_c - temperature_c,
            ("device_fan_speed_ratio", ("0",)): round(min(1.0, temperature_c / 100), 2),
        }
        for name, value in thresholds.items():
            values["device_temperature_threshold_celsius", (name,)] = value
            margin = profile.slowdown_c - value
            values["device_temperature_margin_threshold_celsius", (name,)] = margin
        return values

    def _clocks(self, activity: float, reasons: frozenset[str]) -> dict[SeriesKey, float]:
        profile = self._profile
        slowed = 0.85 if reasons else 1.0
        graphics_hz = profile.graphics_hz * (slowed - 0.06 * activity) if activity else 345e6
        now = (graphics_hz, graphics_hz, profile.memory_hz, graphics_hz * 0.9)
        highest = (profile.graphics_hz,) * 2 + (profile.memory_hz, profile.graphics_hz * 0.9)
        values: dict[SeriesKey, float] = {}
        for domain, clock_hz, max_hz in zip(CLOCK_DOMAINS, now, highest, strict=True):
            # Clocks move in steps of 15 MHz.
            values["device_clock_hertz", (domain,)] = round(clock_hz / 15e6) * 15_000_000
            values["device_clock_max_hertz", (domain,)] = round(max_hz / 15e6) * 15_000_000
        for reason in THROTTLE_REASONS:
            values["device_throttle_active", (reason,)] = int(reason in reasons)
        for reason in TIMED_THROTTLE_REASONS:
            values["device_throttle_seconds_total", (reason,)] = round(self._throttled_s[reason], 3)
        policies = dict.fromkeys(VIOLATION_POLICIES, 0.0)
        policies["power"] = self._throttled_s["sw_power_cap"]
        policies["thermal"] = self._throttled_s["sw_thermal"]
        for policy, seconds in policies.items():
            values["device_violation_seconds_total", (policy,)] = round(seconds, 3)
        values["device_performance_state", ()] = 0 if activity else 8
        return values

    def _links(self, in_use: bool) -> dict[SeriesKey, float]:
        highest = self._profile.pcie_generation
        values: dict[SeriesKey, float] = {
            # An idle link drops to the slowest generation to save power.
            ("device_pcie_link_generation", ()): highest if in_use else 1,
            ("device_pcie_link_generation_max", ()): highest,
            ("device_pcie_link_width_lanes", ()): 16,
            ("device_pcie_link_width_max_lanes", ()): 16,
            ("device_pcie_replay_total", ()): 0,
        }
        for error in PCIE_ERRORS:
            values["device_pcie_errors_total", (error,)] = 0
        for way in _WAYS:
            if way.startswith("pcie") or self._profile.nvlinks:
                values[f"device_{way}_bytes_total", ()] = int(self._moved[way])
                values[f"device_{way}_bytes_per_second", ()] = int(self._rates[way])
        if self._profile.nvlinks:
            values["device_nvlink_fabric_state", ()] = 3
            values["device_nvlink_fabric_healthy", ()] = 1
            for error in NVLINK_ERRORS:
                values["device_nvlink_errors_total", (error,)] = 0
        for link in range(self._profile.nvlinks):
            values["device_nvlink_link_up", (str(link),)] = 1
        return values


_MODES: Mapping[SeriesKey, float] = {
    ("device_recovery_action", ()): 0,
    ("device_persistence_mode", ()): 1,
    ("device_ecc_mode", ()): 1,
    ("device_mig_mode", ()): 0,
    ("device_compute_mode", ()): 0,
    ("device_vgpu_licensed", ()): 0,
}


def _no_errors() -> Mapping[SeriesKey, float]:
    kinds = {
        "ecc_errors_total": ("corrected", "uncorrected"),
        "ecc_aggregate_errors_total": ("corrected", "uncorrected"),
        "remapped_rows": ("correctable", "uncorrectable"),
        "retired_pages": ("single_bit", "double_bit"),
        "xid_errors_total": ("79",),
        "health_events_total": ("gpu_unavailable",),
    }
    values: dict[SeriesKey, float] = {
        (f"device_{name}", (kind,)): 0 for name, own in kinds.items() for kind in own
    }
    for kind in ("corrected", "uncorrected"):
        for location in ECC_LOCATIONS:
            values["device_ecc_location_errors_total", (kind, location)] = 0
    for availability in REMAP_AVAILABILITIES:
        spare = 640 if availability == "max" else 0
        values["device_row_remap_banks", (availability,)] = spare
    for flag in ("row_remap_pending", "row_remap_failure", "retired_pages_pending"):
        values[f"device_{flag}", ()] = 0
    return values


_NO_ERRORS = _no_errors()


_PORT_BYTES_PER_S = 50e9

INTERVAL_S = 1.0


def _workload(index: int) -> Workload:
    return Workload("simulated", f"simulated-{index}", "trainer")


class SimulatedSource(Source):
    """The simulated devices; ``load_of(index)`` is a load from 0 to 1, None if unused."""

    name = "simulated"

    def __init__(
        self,
        config: SimulatedConfig,
        load_of: Callable[[int], float | None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._load_of = load_of
        profile = PROFILES[config.profile]
        self._devices = [SimulatedDevice(index, profile) for index in range(config.devices)]
        self._read_at: float | None = None
        self._sent_bytes = 0.0

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every("simulated", INTERVAL_S, lambda: self._read(sink))

    def _read(self, sink: Sink) -> None:
        now, begun = self._wall(), self._monotonic()
        elapsed_s = 0.0 if self._read_at is None else begun - self._read_at
        self._read_at = begun
        for index, device in enumerate(self._devices):
            sink.publish_device(device.advance(now, elapsed_s, self._load_of(index)))
        used = [d.device for d in self._devices if self._load_of(d.device.index) is not None]
        workloads = {device.uuid: (_workload(device.index),) for device in used}
        sink.publish_host(self._network(now, elapsed_s))
        sink.publish_attribution(Attribution("simulated", now, workloads))
        sink.publish_health(SourceHealth(self.name, True, duration_s=self._monotonic() - begun))

    def _network(self, now: float, elapsed_s: float) -> HostSample:
        """Return one port for all devices, which is as busy as they are."""
        port = ("mlx5_0", "1")
        self._sent_bytes += (
            elapsed_s
            * _PORT_BYTES_PER_S
            * sum(self._load_of(device.device.index) or 0.0 for device in self._devices)
            / len(self._devices)
        )
        values: dict[SeriesKey, float] = {
            ("network_port_info", (*port, "InfiniBand", "simulated", "")): 1,
            ("network_port_up", port): 1,
            ("network_port_rate_bytes_per_second", port): _PORT_BYTES_PER_S,
            ("network_port_receive_bytes_total", port): round(self._sent_bytes),
            ("network_port_transmit_bytes_total", port): round(self._sent_bytes),
            ("network_port_errors_total", (*port, "symbol_error")): 0,
            ("network_port_congestion_total", (*port, "port_xmit_wait")): 0,
        }
        near = {("network_port_gpu_info", (*port, d.device.uuid)): 1.0 for d in self._devices}
        return HostSample(now, values | near, "network", {"/".join(port): values})
