"""The simulated devices obey physics and fill the catalogue."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from warpwatch_devices.config import SimulatedConfig
from warpwatch_devices.simulated.device import SimulatedDevice
from warpwatch_devices.simulated.profiles import PROFILES
from warpwatch_devices.simulated.source import SimulatedSource, simulated_uuid
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import DeviceSample

# What the exporter derives from the sample itself, not from its values.
OF_THE_SAMPLE = {
    "device_up",
    "device_info",
    "device_sample_timestamp_seconds",
    "device_nvlink_links",
    "device_nvlink_links_up",
    "process_gpu_memory_bytes",
    "process_gpu_utilization_ratio",
    # Known from elsewhere than the device, and nothing has gone wrong with it.
    "device_workload_info",
    "device_slurm_job_info",
    "device_xid_last_timestamp_seconds",
}


def run(profile: str, load: float | None, seconds: int, index: int = 0) -> list[DeviceSample]:
    device = SimulatedDevice(index, PROFILES[profile])
    return [device.advance(1000.0 + second, 1.0, load) for second in range(seconds)]


def value(sample: DeviceSample, name: str, *labels: str) -> float:
    return sample.values[f"device_{name}", labels]


def test_every_device_metric_of_the_catalogue_is_filled() -> None:
    sample = run("h100", 0.9, 2)[-1]
    expected = {row.name for row in CATALOGUE.values() if row.scope == "device"} - OF_THE_SAMPLE
    assert {name for name, _ in sample.values} == expected
    for name, labels in sample.values:
        assert len(labels) == len(CATALOGUE[name].labels)
    memory_bytes = sample.processes[0].memory_bytes
    assert memory_bytes is not None
    assert memory_bytes < value(sample, "memory_used_bytes")
    # Smaller ones have many samples too.
    assert len(run("l4", None, 1)[-1].values) >= 40


@pytest.mark.parametrize("profile", ["h100", "a100", "l4"])
def test_values_stay_within_what_the_device_can_do(profile: str) -> None:
    limits = PROFILES[profile]
    for load in (None, 0.0, 0.3, 1.0, 7.0, -1.0):
        sample = run(profile, load, 60)[-1]
        assert limits.idle_w * 0.99 <= value(sample, "power_watts") <= limits.limit_w
        assert 20 <= value(sample, "temperature_celsius", "gpu") < limits.slowdown_c
        used = value(sample, "memory_used_bytes") + value(sample, "memory_free_bytes")
        total = used + value(sample, "memory_reserved_bytes")
        assert total == value(sample, "memory_total_bytes") == limits.memory_bytes
        for (name, _), number in sample.values.items():
            assert not name.endswith("_ratio") or 0 <= number <= 1, name


def test_power_follows_load_at_once_and_temperature_with_a_delay() -> None:
    samples = run("h100", 1.0, 120)
    assert value(samples[4], "power_watts") > 0.9 * value(samples[-1], "power_watts") > 600
    early, late = (value(samples[i], "temperature_celsius", "gpu") for i in (4, -1))
    assert early < 45 < 60 < late
    powers = [value(sample, "power_watts") for sample in samples]
    by_trapezes = sum((a + b) / 2 for a, b in pairwise(powers))
    first, last = (value(samples[i], "energy_joules_total") for i in (0, -1))
    assert last - first == pytest.approx(by_trapezes, rel=1e-3)


def test_counters_never_fall() -> None:
    device = SimulatedDevice(0, PROFILES["h100"])
    counters = [name for name, row in CATALOGUE.items() if row.kind == "counter"]
    before: dict[SeriesKey, float] = {}
    for load in (None, 0.5, 1.0, 0.0, None, 0.2) * 5:
        values = device.advance(0.0, 1.0, load).values
        now = {key: number for key, number in values.items() if key[0] in counters}
        assert all(number >= before.get(key, 0) for key, number in now.items())
        before = now
    assert before["device_busy_seconds_total", ()] == pytest.approx(8.5, abs=0.5)


def test_an_idle_device_says_so_and_no_one_uses_it() -> None:
    sample = run("h100", None, 60)[-1]
    assert value(sample, "utilization_ratio") == 0
    assert value(sample, "throttle_active", "idle") == 1
    assert value(sample, "memory_used_bytes") == 0
    assert value(sample, "pcie_link_generation") == 1
    assert sample.processes == ()
    assert sample.device.name == "NVIDIA H100 80GB HBM3 (simulated)"
    assert sample.device.info["simulated"] == "true"


def test_uuids_are_the_same_in_every_run() -> None:
    assert simulated_uuid(0) == "GPU-7bb68f2d-145a-5a7d-8f79-9583425da8f2"
    assert len({simulated_uuid(index) for index in range(64)}) == 64


def test_the_source_follows_the_load_of_each_device() -> None:
    clock, sink = ManualClock(), RecordingSink()
    loops = HandLoops(clock)
    config = SimulatedConfig(enabled=True, devices=3)
    clocks = {"monotonic": clock.monotonic, "wall": clock.wall}
    source = SimulatedSource(config, {0: 1.0, 1: 0.5, 2: None}.get, **clocks)
    source.start(loops, sink)
    for _ in range(3):
        loops.run("simulated")
        clock.advance(1)
    newest = [sink.devices[simulated_uuid(index)][-1] for index in range(3)]
    ratios = [value(sample, "utilization_ratio") for sample in newest]
    assert ratios == pytest.approx([1.0, 0.5, 0.0], abs=0.03)
    assert sink.healths[-1].up
    (workload,) = sink.attributions[-1].workloads[simulated_uuid(1)]
    assert (workload.namespace, workload.pod) == ("simulated", "simulated-1")
    assert simulated_uuid(2) not in sink.attributions[-1].workloads
    # Two seconds of one port at 50 GB/s that is half as busy as its devices.
    port = sink.hosts[-1].ports["mlx5_0/1"]
    assert port["network_port_transmit_bytes_total", ("mlx5_0", "1")] == 50_000_000_000
