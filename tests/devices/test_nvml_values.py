"""The values of each kind of GPU, their units, and absent ones."""

import json
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.devices.conftest import Golden
from tests.devices.nvml_by_hand import Stepper
from warpwatch_devices.nvml.fields import RARE_FIELDS, SLOW_FIELDS, fast_fields
from warpwatch_telemetry.samples import DeviceProcess

# A driver that has every field where nvml.h has it now.
VERSION = "580.105.08"
SLOW = 10
EVERYTHING = 60


# No two values are the same, as far as the driver can tell them apart.
EVERY_VALUE = json.loads(Path(__file__).with_name("every_value.json").read_text())


@pytest.mark.parametrize("profile", ["v100", "t4", "a100", "h100", "b200", "rtx4090"])
def test_each_gpu_tells_what_it_supports(process: Stepper, profile: str, golden: Golden) -> None:
    fake = process.begin(profile, **EVERY_VALUE)
    fake.processes(0, "4000001/1000/C", "4000001/1000/G", "4000002/na/C", "4000003/50/M")
    process.step()
    before = Counter(process.nvml.driver.calls()[0])
    values = process.step(EVERYTHING)
    calls = Counter(process.nvml.driver.calls()[0]) - before
    facts = {k: text for k, text in process.gpu.device.info.items() if k != "driver_load"}
    lines = [str(replace(process.gpu.device, info=facts)), *map(str, process.gpu.processes)]
    lines += [f"{name} {values[name]}" for name in sorted(values)]
    lines += [f"{name} {calls[name]}" for name in sorted(calls)]
    golden(f"nvml_{profile}.txt", "".join(f"{line}\n" for line in lines).encode())
    assert calls.total() / EVERYTHING <= 12.0
    counted = sum(n for name, n in process.counts.items() if name.startswith("nvml_calls"))
    assert counted == pytest.approx(process.calls(), rel=0.02)
    assert not [name for name in process.counts if name.startswith("nvml_errors")]


def test_each_field_has_its_series(process: Stepper, golden: Golden) -> None:
    fake = process.begin("h100")
    fake.fail("nvmlGpmQueryDeviceSupport", 3)
    numbers = {f.number for f in (*fast_fields(VERSION), *SLOW_FIELDS, *RARE_FIELDS)}
    for number in numbers:
        fake.field(number, value=2**33 + number)
    values = process.step(EVERYTHING)
    lines = [f"{name} {values[name]}" for name in sorted(values)]
    golden("nvml_fields.txt", "".join(f"{line}\n" for line in lines).encode())


def test_all_ones_are_no_value_but_a_wide_counter_may_have_them_below(process: Stepper) -> None:
    fake = process.begin("h100", sentinels=1)
    sentinels = process.step()
    fake.set(sentinels=0)
    fake.field(83, value=2**32 - 1)
    values = process.step(SLOW)
    all_ones = (2**16 - 1, 2**32 - 1, 2**64 - 1)
    assert not [name for name, value in sentinels.items() if value in all_ones]
    assert "recovery_action" not in sentinels
    assert "power_watts" not in sentinels
    assert values["energy_joules_total"] == 4_294_967.295
    assert values["power_watts"] > 0
    fake.field(83, value=math.nan)
    assert "energy_joules_total" not in process.step(SLOW)
    # One that the driver does not fill in, and one that says that the device is lost.
    fake.field(83, value=5.0)
    assert process.step()["energy_joules_total"] == 0.005
    fake.field(83, error=-1)
    assert "energy_joules_total" not in process.step(SLOW)
    fake.field(83, error=15)
    process.step()
    assert (process.gpu.up, process.gpu.reason) == (False, "lost")


def test_pcie_bytes_are_reported_once_they_are_seen_to_have_64_bits(process: Stepper) -> None:
    fake = process.begin("h100")
    fake.fail("nvmlGpmQueryDeviceSupport", 3)
    seen = []
    for raw in (2**32 - 1, 2**33, 2**33 + 7):
        fake.field(198, value=raw)
        seen.append(process.step(2).get("pcie_receive_bytes_total"))
    fake.set(lost=1)
    process.step()
    fake.set(lost=0)
    fake.field(198, value=5)
    seen.append(process.step(SLOW)["pcie_receive_bytes_total"])
    # At last the device was reset.
    assert seen == [None, 2**33, 2**33 + 7, 2**33 + 12]
    # One with these counters is not counted by its fields before their first values.
    process.begin("h100").field(198, value=2**33)
    assert "pcie_receive_bytes_total" not in process.step()


def test_errors_of_nvlink_do_not_fall_where_one_link_is_silent(process: Stepper) -> None:
    name = "nvlink_errors_total{type=receive}"
    fake = process.begin("b200", nvlink_errors=10)
    assert process.step(SLOW + 1)[name] == 180
    for code in (999, 3):
        fake.set(nvlinks_silent=0b100, nvlink_silence=code)
        assert process.step(SLOW)[name] == 180
    fake.set(nvlink_errors=11)
    assert process.step(SLOW)[name] == 197
    # A link that said that it has no such counter is asked again.
    fake.set(nvlinks_silent=0)
    assert process.step(EVERYTHING)[name] == 198
    fake.set(nvlinks_silent=0b100, lost=1)
    process.step()
    fake.set(lost=0)
    assert process.step(2 * SLOW)[name] == 198


def test_events_are_asked_for_once_a_device_was_read_well(process: Stepper) -> None:
    fake = process.begin("h100")
    fake.fail("nvmlDeviceGetFieldValues", 15)
    process.step(2)
    before = process.calls("nvmlDeviceGetSupportedEventTypes")
    fake.fail("nvmlDeviceGetFieldValues", 0)
    process.step(SLOW)
    assert (before, process.calls("nvmlDeviceGetSupportedEventTypes")) == (0, 1)
    # Once more when it comes back.
    fake.set(lost=1)
    process.step()
    fake.set(lost=0)
    process.step(SLOW)
    assert process.calls("nvmlDeviceGetSupportedEventTypes") == 2


def test_an_older_driver_counts_throttling_too(process: Stepper) -> None:
    fake = process.begin("h100", old_fields=1, throttle_reasons=0x40)
    fake.set(driver_version="575.57.08")
    first = process.step()["throttle_seconds_total{reason=hw_thermal}"]
    assert process.step()["throttle_seconds_total{reason=hw_thermal}"] == first + 1


def test_one_field_that_fails_the_whole_call_costs_only_itself(process: Stepper) -> None:
    fake = process.begin("h100")
    fake.fail("nvmlGpmQueryDeviceSupport", 3)
    fake.field(197, fails_call=2)
    fake.field(198, value=2**33)
    process.step()
    before = process.calls("nvmlDeviceGetFieldValues")
    values = process.step()
    assert process.calls("nvmlDeviceGetFieldValues") == before + 1
    batches = ("fields", "slow_fields", "rare_fields")
    assert sum(process.counts[f"nvml_calls_total {name}"] for name in batches) == before + 1
    assert "pcie_transmit_bytes_total" not in values
    assert "pcie_receive_bytes_total" in values
    assert "energy_joules_total" in values


def test_a_reader_that_fails_costs_its_own_values_alone(
    process: Stepper, caplog: pytest.LogCaptureFixture
) -> None:
    fake = process.begin("h100", temperature_c=55, throttle_reasons=4, fabric_state=0)
    # This one may not be read, and these are the code of a function that the library lacks.
    fake.fail("nvmlDeviceGetBAR1MemoryInfo", 4)
    fake.fail("nvmlDeviceGetProcessUtilization", 3)
    fake.processes(0, "4000001/100")
    fake.field(186, error=4)
    # Whether these are supported is not known: nothing replaces them.
    fake.field(185, error=999)
    fake.field(138, error=999)
    fake.fail("nvmlDeviceGetMaxPcieLinkGeneration", 999)
    fake.fail("nvmlDeviceGetTemperatureV", 13)
    fake.fail("nvmlDeviceGetCurrentClocksEventReasons", 13)
    values = process.step()
    assert "encoder_utilization_ratio" in values and "nvlink_fabric_state" not in values
    assert values["temperature_celsius{sensor=gpu}"] == 55
    assert values["throttle_active{reason=sw_power_cap}"] == 1
    # A slow value whose newest reading failed is gone until the next.
    fake.fail("nvmlDeviceGetEncoderUtilization", 999)
    values = process.step(4 * SLOW)
    absent = {"bar1_memory_used_bytes", "nvlink_transmit_bytes_total", "power_watts"}
    assert values.keys().isdisjoint({"encoder_utilization_ratio", *absent})
    assert {"decoder_utilization_ratio", "memory_used_bytes"} <= values.keys()
    assert process.counts["nvml_errors_total encoder unknown"] == 4
    assert process.counts["nvml_errors_total fields no_permission"] == 1
    for function in ("nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetProcessUtilization"):
        assert process.calls(function) == 1
    assert caplog.messages == ["not permitted, so not read: bar1, some of fields"]
    assert process.calls("nvmlDeviceGetTemperatureV") == 1
    assert process.gpu.up and process.gpu.processes[0].sm_ratio is None
    fake.fail("nvmlDeviceGetEncoderUtilization", 0)
    assert "encoder_utilization_ratio" in process.step(SLOW)
    # A value that never changes is read until it was read once.
    fake.fail("nvmlDeviceGetMaxPcieLinkGeneration", 0)
    assert "pcie_link_generation_max" in process.step(EVERYTHING)
    fake.fail("nvmlDeviceGetEncoderUtilization", 4)
    for lost in (1, 0):
        fake.set(lost=lost)
        process.step(SLOW + 1)
    assert [text for text in caplog.messages if "not permitted" in text][1:] == [
        "not permitted, so not read: encoder"
    ]


def test_without_fields_power_comes_from_calls_and_energy_from_samples(process: Stepper) -> None:
    fake = process.begin("h100", power_w=300, nvlinks_down=0b10)
    for number in (83, 165, 185, 187, 188, 189, 190):
        fake.field(number, error=3)
    first = process.step()
    assert all(first[f"nvlink_link_up{{link={link}}}"] == (link != 1) for link in range(18))
    last = process.step(3)
    assert last["energy_joules_total"] - first["energy_joules_total"] == pytest.approx(900)
    assert last["power_watts"] == 300
    limits = ("power_limit_watts", "power_limit_min_watts", "power_limit_max_watts")
    assert [last[name] for name in limits] == [700, 200, 700]


def test_where_there_are_no_samples_utilization_is_integrated(process: Stepper) -> None:
    process.begin("h100", load=60)
    assert process.step()["busy_seconds_total"] == 0
    # The sum of the driver's samples.
    assert process.step(3)["busy_seconds_total"] == pytest.approx(1.8)
    # There are no new samples.
    process.device.step()
    assert process.gpu.values["device_busy_seconds_total", ()] == pytest.approx(1.8)
    # Samples from before the clock was set back hide no new ones.
    process.nvml.clock.set_wall(1.6e9)
    process.step(2)
    assert process.step()["busy_seconds_total"] > 2.3
    fake = process.begin("h100", load=100)
    fake.fail("nvmlDeviceGetSamples", 3)
    assert process.step()["busy_seconds_total"] == 0
    assert process.step(2)["busy_seconds_total"] == 2
    process.nvml.advance(2.0)
    assert process.step()["busy_seconds_total"] == 5
    # A longer gap is unknown.
    process.nvml.advance(2.1)
    assert process.step()["busy_seconds_total"] == 5
    assert process.step()["busy_seconds_total"] == 6
    assert process.calls("nvmlDeviceGetSamples") == 1


@pytest.mark.parametrize("sees_host", [True, False])
def test_processes_are_listed_once_with_what_is_known_of_them(
    process: Stepper, monkeypatch: pytest.MonkeyPatch, sees_host: bool
) -> None:
    monkeypatch.setattr("warpwatch_devices.nvml.processes.sees_host_processes", lambda: sees_host)
    fake = process.begin("h100", load=60)
    fake.processes(0, "self/1000/C", "4000001/na/C", "4000001/70/G", "4000002/na/M")
    process.step(SLOW)
    own = Path("/proc/self/comm").read_text().strip() if sees_host else ""
    assert sorted(process.gpu.processes, key=lambda one: one.pid) == [
        DeviceProcess(os.getpid(), own, 1000 * 2**20, 0.15),
        DeviceProcess(4000001, "", 70 * 2**20, 0.15),
        DeviceProcess(4000002, "", None, 0.15),
    ]
    # Within a second the driver has no new samples.
    for _ in range(2):
        process.nvml.advance(0.3)
        process.device.step()
    assert {one.sm_ratio for one in process.gpu.processes} == {0.15}
    # A process with the number of one that has left has its own name.
    fake.processes(0)
    process.step(SLOW + 2)
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    comm.write_text("successor")
    fake.processes(0, "self/1000/C")
    process.step(2)
    comm.write_text(before)
    names = [one.name for one in process.gpu.processes]
    assert names == (["successor"] if sees_host else [""])
    # A list longer than its room is read again.
    fake.processes(0, *(f"{5_000_000 + i}/1/C" for i in range(32)))
    process.step(2)
    assert len(process.gpu.processes) == 32
