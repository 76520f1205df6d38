"""The simulated devices obey physics and fill the catalogue."""

import pytest

from tests.cases import cases
from tests.devices.conftest import Golden
from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from warpwatch_devices.config import SimulatedConfig
from warpwatch_devices.simulated import PROFILES, SimulatedDevice, SimulatedSource, simulated_uuid
from warpwatch_telemetry.catalogue import CATALOGUE, series_text
from warpwatch_telemetry.samples import DeviceSample

OF_THE_SAMPLE = set(cases(__file__)["of_the_sample"])


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


def test_devices_follow_their_load_as_they_did(golden: Golden) -> None:
    """Power at once, temperature with a delay; energy is power over time, counters only rise."""
    lines: list[str] = []
    for profile in ("h100", "a100", "l4"):
        device, seen = SimulatedDevice(1, PROFILES[profile]), set[str]()
        lines.append(str(device.device))
        for load, seconds in (
            (None, 1),
            (None, 59),
            (1.0, 4),
            (1.0, 56),
            (0.3, 60),
            (7.0, 60),
            (-1, 60),
        ):
            for _ in range(2 * seconds):
                sample = device.advance(0.0, 0.5, load)
            values = {f"{series_text(key)} {of:.6g}" for key, of in sample.values.items() if of}
            lines += [f"{profile} under {load}: {sample.processes}"]
            # Return the changes since then.
            lines += sorted(values - seen)
            seen = values
    golden("simulated.txt", "".join(f"{line}\n" for line in lines).encode())


def test_the_source_follows_the_load_of_each_device() -> None:
    clock, sink = ManualClock(), RecordingSink()
    loops = HandLoops(clock)
    config = SimulatedConfig(enabled=True, devices=4)
    clocks = {"monotonic": clock.monotonic, "wall": clock.wall}
    source = SimulatedSource(config, {0: 1.0, 1: 0.5, 2: None, 3: 0.0}.get, **clocks)
    source.start(loops, sink)
    for _ in range(3):
        loops.run("simulated")
        clock.advance(2)
    newest = [sink.devices[simulated_uuid(index)][-1] for index in range(4)]
    ratios = [value(sample, "utilization_ratio") for sample in newest]
    assert ratios == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=0.03)
    assert {sample.time for sample in newest} == {clock.wall() - 2}
    assert sink.healths[-1].up
    (workload,) = sink.attributions[-1].workloads[simulated_uuid(1)]
    assert (workload.namespace, workload.pod) == ("simulated", "simulated-1")
    used = {simulated_uuid(index) for index in (0, 1, 3)}
    assert sink.attributions[-1].workloads.keys() == used
    # Four seconds of one port at 50 GB/s, which is as busy as its devices: 3/8.
    port = sink.hosts[-1].ports["mlx5_0/1"]
    assert port["network_port_transmit_bytes_total", ("mlx5_0", "1")] == 75_000_000_000
    near = [labels[2] for name, labels in sink.hosts[-1].values if name.endswith("gpu_info")]
    assert near == [simulated_uuid(index) for index in range(4)]
