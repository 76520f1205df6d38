"""What is read of each kind of GPU, in which unit, and what is absent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_stepping import Stepper, stepping
from warpwatch_devices.nvml.batch import GrowthRate
from warpwatch_devices.nvml.fields import fast_fields
from warpwatch_devices.nvml.pcie_bytes import PATIENCE_ROUNDS, PcieBytes
from warpwatch_devices.nvml.processes import ProcessUse
from warpwatch_devices.nvml.sample_buffers import (
    BUSY_SECONDS,
    Integral,
    SampledIntegral,
    busy_samples,
)
from warpwatch_devices.nvml.tiers import RARE_S, SLOW_S, SLOWER_S, rounds_of
from warpwatch_telemetry.metric import Values

# A driver that has every field where nvml.h has it now.
VERSION = "580.105.08"
SLOW = 10
EVERYTHING = 60


@pytest.fixture(scope="module")
def process(fake_nvml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stepper]:
    fake = FakeDriver(fake_nvml, tmp_path_factory.mktemp("driver"), gpus=1, driver_version=VERSION)
    with stepping(fake) as stepper:
        yield stepper


ALWAYS = {
    "utilization_ratio",
    "memory_utilization_ratio",
    "busy_seconds_total",
    "memory_used_bytes",
    "bar1_memory_total_bytes",
    "encoder_utilization_ratio",
    "decoder_utilization_ratio",
    "power_watts",
    "power_limit_watts",
    "power_limit_default_watts",
    "power_limit_min_watts",
    "power_limit_max_watts",
    "energy_joules_total",
    "temperature_celsius{sensor=gpu}",
    "clock_hertz{domain=sm}",
    "clock_hertz{domain=video}",
    "clock_max_hertz{domain=memory}",
    "throttle_active{reason=sw_power_cap}",
    "performance_state",
    "pcie_link_generation",
    "pcie_link_width_max_lanes",
    "persistence_mode",
    "compute_mode",
    "vgpu_licensed",
}
HOPPER = {
    "mig_mode",
    "ecc_mode",
    "ecc_location_errors_total{type=uncorrected,location=dram}",
    "remapped_rows{type=correctable}",
    "row_remap_failure",
    "row_remap_banks{availability=max}",
    "recovery_action",
    "power_instant_watts",
    "temperature_celsius{sensor=memory}",
    "temperature_margin_celsius",
    "temperature_margin_threshold_celsius{threshold=slowdown}",
    "throttle_seconds_total{reason=sw_thermal}",
    "violation_seconds_total{policy=thermal}",
    "pcie_errors_total{type=fatal}",
    "nvlink_receive_bytes_total",
    "nvlink_link_up{link=17}",
    "nvlink_errors_total{type=recovery}",
    "jpeg_utilization_ratio",
    "ofa_utilization_ratio",
}
FABRIC = {"nvlink_fabric_state", "nvlink_fabric_healthy"}
OLD = {
    "temperature_threshold_celsius{threshold=gpu_max}",
    "retired_pages{cause=double_bit}",
    "retired_pages_pending",
}
SUPPORTED = {
    "v100": ALWAYS
    | OLD
    | {
        "temperature_celsius{sensor=memory}",
        "nvlink_link_up{link=5}",
        "nvlink_errors_total{type=replay}",
        "nvlink_transmit_bytes_total",
        "ecc_mode",
    },
    "t4": ALWAYS | OLD | {"ecc_mode"},
    "a100": ALWAYS | (HOPPER - {f for f in HOPPER if "margin" in f or "link=17" in f}),
    "h100": ALWAYS | HOPPER | FABRIC | {"temperature_threshold_celsius{threshold=slowdown}"},
    "b200": ALWAYS | HOPPER | FABRIC | {"nvlink_errors_total{type=receive}"},
    "rtx4090": ALWAYS | {"fan_speed_ratio{fan=1}", "power_instant_watts"},
}
NEWER = {
    "mig_mode",
    "row_remap_failure",
    "recovery_action",
    "power_instant_watts",
    "temperature_margin_celsius",
    "throttle_seconds_total{reason=sw_thermal}",
    "pcie_receive_bytes_total",
    "jpeg_utilization_ratio",
    "fan_speed_ratio{fan=0}",
}
UNSUPPORTED = {
    "v100": NEWER | {"nvlink_link_up{link=6}"},
    "t4": (NEWER - {"throttle_seconds_total{reason=sw_thermal}"}) | {"nvlink_link_up{link=0}"},
    "a100": {"temperature_margin_celsius", "retired_pages_pending", "nvlink_link_up{link=12}"},
    "h100": OLD | {"fan_speed_ratio{fan=0}", "nvlink_errors_total{type=receive}"},
    "b200": OLD | {"nvlink_errors_total{type=replay}", "nvlink_errors_total{type=crc_flit}"},
    "rtx4090": {
        "ecc_errors_total{type=corrected}",
        "mig_mode",
        "nvlink_link_up{link=0}",
        "nvlink_receive_bytes_total",
        "remapped_rows{type=correctable}",
        "temperature_celsius{sensor=memory}",
    },
}


@pytest.mark.parametrize("profile", SUPPORTED)
def test_each_gpu_tells_what_it_supports_in_few_calls_and_nothing_else(
    process: Stepper, profile: str
) -> None:
    process.begin(profile)
    process.step(SLOW + 1)
    before = process.calls()
    values = process.step(EVERYTHING)
    calls = (process.calls() - before) / EVERYTHING
    counted = sum(n for name, n in process.counts.items() if name.startswith("nvml_calls"))
    total = process.calls()
    assert SUPPORTED[profile] - values.keys() == set()
    assert UNSUPPORTED[profile] & values.keys() == set()
    # The two calls of GPM, where there is GPM, are made elsewhere.
    assert calls <= (10.0 if profile in ("h100", "b200") else 12.0)
    assert counted == pytest.approx(total, rel=0.02)
    assert not [name for name in process.counts if name.startswith("nvml_errors")]


def test_values_are_in_base_units(process: Stepper) -> None:
    fake = process.begin("h100", load=80, power_w=512, temperature_c=61, nvlinks_down=4)
    fake.set(encoder=25, bar1_used_mib=3, pcie_generation=3, remapped_correctable=2)
    fake.set(throttle_reasons=0x24, ecc_uncorrected=7, recovery_action=1)
    values = process.step(2)
    info = process.gpu["info"]
    assert info == {
        "driver_version": VERSION,
        "pci_bus_id": "00000000:18:00.0",
        "vbios_version": info["vbios_version"],
        "serial": info["serial"],
        "minor_number": "0",
        "architecture": "Hopper",
    }
    expected = {
        "utilization_ratio": 0.8,
        "memory_used_bytes": 20 * 2**30,
        "power_watts": 512.0,
        "power_instant_watts": 512.0,
        "power_limit_watts": 700.0,
        "temperature_celsius{sensor=gpu}": 61,
        "temperature_celsius{sensor=memory}": 69,
        "temperature_margin_threshold_celsius{threshold=shutdown}": -8,
        "clock_hertz{domain=memory}": 2_619_000_000,
        "throttle_active{reason=sw_power_cap}": 1,
        "throttle_active{reason=sw_thermal}": 1,
        "throttle_active{reason=idle}": 0,
        "encoder_utilization_ratio": 0.25,
        "bar1_memory_used_bytes": 3 * 2**20,
        "pcie_link_generation": 3,
        "pcie_link_generation_max": 5,
        "remapped_rows{type=correctable}": 2,
        "ecc_errors_total{type=uncorrected}": 7,
        "recovery_action": 1,
        "nvlink_link_up{link=1}": 1,
        "nvlink_link_up{link=2}": 0,
        "vgpu_licensed": 0,
    }
    assert {name: values.get(name) for name in expected} == expected


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


RECEIVED = ("device_pcie_receive_bytes_total", ())


def link(generation: int, received: float) -> Values:
    return {
        ("device_pcie_link_generation_max", ()): generation,
        ("device_pcie_link_width_max_lanes", ()): 16,
        RECEIVED: received,
    }


def test_a_32_bit_counter_of_a_link_that_fills_it_within_a_round_is_not_reported() -> None:
    seen = []
    for generation, interval_s in ((1, 1.0), (2, 1.0), (4, 0.1), (5, 0.1)):
        values = link(generation, 7)
        PcieBytes(interval_s).count(values, {})
        seen.append(values.get(RECEIVED))
    unknown: Values = {RECEIVED: 7}
    PcieBytes(0.1).count(unknown, {})
    assert seen == [7, None, 7, None]
    assert unknown == {}


def test_a_32_bit_counter_goes_on_where_it_starts_over_and_where_its_handle_is_new() -> None:
    pcie, seen = PcieBytes(1.0), []
    for raw in (2**32 - 10, 90, 50):
        values = link(1, raw)
        pcie.count(values, {})
        seen.append(values[RECEIVED])
    pcie.begin()
    for raw in (20, 30, 2**33):
        values = link(1, raw)
        pcie.count(values, {})
        seen.append(values[RECEIVED] - seen[2])
    # Meanwhile is not known; then it turns out to be wide.
    assert seen == [2**32 - 10, 2**32 + 90, 2 * 2**32 + 50, 0, 10, 2**33 - 20]


def test_pcie_bytes_go_on_where_gpm_ends_and_comes_back() -> None:
    pcie = PcieBytes(1.0)

    def count(raw: float, gpm: float | None) -> float | None:
        values = link(5, raw)
        pcie.count(values, {} if gpm is None else {RECEIVED: gpm})
        return values.get(RECEIVED)

    assert [count(2**40, 100), count(2**40, 300)] == [100, 300]
    # For some rounds it may come back.
    assert [count(2**40, None) for _ in range(PATIENCE_ROUNDS)] == [None] * PATIENCE_ROUNDS
    assert [count(2**40 + 50, None), count(2**40 + 90, None)] == [300, 340]
    assert [count(2**40 + 99, 7), count(2**40 + 99, 9)] == [340, 342]
    pcie.begin()
    assert [count(2**40 + 100, None), count(2**40 + 101, None)] == [342, 343]


def test_pcie_bytes_are_reported_once_they_are_seen_to_have_64_bits(process: Stepper) -> None:
    fake = process.begin("h100")
    seen = []
    for raw in (2**32 - 1, 2**33, 2**33 + 7):
        fake.field(198, value=raw)
        seen.append(process.step(2).get("pcie_receive_bytes_total"))
    fake.set(lost=1)
    process.step()
    fake.set(lost=0)
    fake.field(198, value=5)
    seen.append(process.step()["pcie_receive_bytes_total"])
    # At last the device was reset.
    assert seen == [None, 2**33, 2**33 + 7, 2**33 + 12]


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
    assert process.step(SLOW + 1)[name] == 198


def test_events_are_asked_for_once_a_device_was_read_well(process: Stepper) -> None:
    fake = process.begin("h100")
    fake.fail("nvmlDeviceGetFieldValues", 15)
    process.step(2)
    before = process.calls("nvmlDeviceGetSupportedEventTypes")
    fake.fail("nvmlDeviceGetFieldValues", 0)
    process.step(3)
    assert (before, process.calls("nvmlDeviceGetSupportedEventTypes")) == (0, 1)


def test_tiers_are_seconds_and_short_rounds_count_as_a_second() -> None:
    tiers = (SLOW_S, SLOWER_S, RARE_S)
    rounds = {s: [rounds_of(tier, s) for tier in tiers] for s in (0.1, 1.0, 5.0, 15.0)}
    assert rounds == {0.1: [10, 30, 60], 1.0: [10, 30, 60], 5.0: [2, 6, 12], 15.0: [1, 2, 4]}


def test_a_rate_is_the_growth_over_the_drivers_own_time() -> None:
    rate = GrowthRate()
    assert rate.per_second(1000, 1_000_000) is None
    assert rate.per_second(3000, 1_500_000) == 4000.0
    assert rate.per_second(3000, 1_500_000) is None
    assert rate.per_second(10, 2_000_000) is None


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("570.172.08", 269),
        ("575.57.08", 251),
        ("580.65.06", 251),
        ("580.82.07", 269),
        ("615.71", 269),
        ("", 269),
    ],
)
def test_drivers_number_the_times_of_throttling_differently(version: str, first: int) -> None:
    throttled = [
        field.number
        for field in fast_fields(version)
        if field.series == (("device_throttle_seconds_total", ("sw_thermal",)),)
    ]
    assert throttled == [first]


def test_an_older_driver_counts_throttling_too(process: Stepper) -> None:
    fake = process.begin("h100", old_fields=1, throttle_reasons=0x40)
    fake.set(driver_version="575.57.08")
    first = process.step()["throttle_seconds_total{reason=hw_thermal}"]
    time.sleep(0.1)
    assert process.step()["throttle_seconds_total{reason=hw_thermal}"] >= first + 0.1


def test_one_field_that_fails_the_whole_call_costs_only_itself(process: Stepper) -> None:
    fake = process.begin("h100")
    fake.field(197, fails_call=2)
    fake.field(198, value=2**33)
    process.step()
    before = process.calls("nvmlDeviceGetFieldValues")
    values = process.step()
    assert process.calls("nvmlDeviceGetFieldValues") == before + 1
    assert "pcie_transmit_bytes_total" not in values
    assert "pcie_receive_bytes_total" in values
    assert "energy_joules_total" in values


def test_a_slow_value_whose_newest_reading_failed_is_gone(process: Stepper) -> None:
    fake = process.begin("h100")
    assert "encoder_utilization_ratio" in process.step()
    fake.fail("nvmlDeviceGetEncoderUtilization", 999)
    values = process.step(SLOW)
    errors = process.counts["nvml_errors_total encoder unknown"]
    assert "encoder_utilization_ratio" not in values
    assert "decoder_utilization_ratio" in values
    assert errors == 1
    fake.fail("nvmlDeviceGetEncoderUtilization", 0)
    assert "encoder_utilization_ratio" in process.step(SLOW)


def test_what_may_not_be_read_is_absent_alone(process: Stepper) -> None:
    fake = process.begin("h100")
    fake.fail("nvmlDeviceGetBAR1MemoryInfo", 4)
    values = process.step(40)
    assert process.calls("nvmlDeviceGetBAR1MemoryInfo") == 1
    assert process.gpu["up"]
    assert "bar1_memory_used_bytes" not in values
    assert "memory_used_bytes" in values


def test_an_older_library_is_asked_for_what_it_has(process: Stepper) -> None:
    fake = process.begin("h100", temperature_c=55, throttle_reasons=4)
    # The code that stands for a function that the library lacks.
    fake.fail("nvmlDeviceGetTemperatureV", 13)
    fake.fail("nvmlDeviceGetCurrentClocksEventReasons", 13)
    values = process.step(3)
    assert process.calls("nvmlDeviceGetTemperatureV") == 1
    assert values["temperature_celsius{sensor=gpu}"] == 55
    assert values["throttle_active{reason=sw_power_cap}"] == 1


def test_without_the_fields_power_comes_from_calls_and_energy_from_samples(
    process: Stepper,
) -> None:
    fake = process.begin("h100", power_w=300)
    for number in (83, 185, 187, 188, 189, 190):
        fake.field(number, error=3)
    first = process.step()
    time.sleep(1.0)
    last = process.step()
    joules = last["energy_joules_total"] - first["energy_joules_total"]
    # Whole samples of a sixth of a second each.
    assert joules / 50 == pytest.approx(round(joules / 50), abs=0.01)
    assert joules >= 250
    assert last["power_watts"] == 300
    limits = ("power_limit_watts", "power_limit_min_watts", "power_limit_max_watts")
    assert [last[name] for name in limits] == [700, 200, 700]


def test_busy_time_is_the_sum_of_the_drivers_samples(process: Stepper) -> None:
    process.begin("h100", load=60)
    assert process.step()["busy_seconds_total"] == 0
    time.sleep(0.5)
    process.step()
    time.sleep(0.5)
    busy_s = process.step(3)["busy_seconds_total"]
    samples = busy_s / 0.6 * 6
    assert samples == pytest.approx(round(samples), abs=0.01)
    assert samples >= 5


def test_a_sample_holds_since_the_one_before_it_but_not_over_a_gap() -> None:
    second = 1_000_000
    integral = Integral()
    samples = busy_samples(integral)
    samples.add([(10 * second, 100), (13 * second, 100)])
    assert integral.total == 0
    # In any order, and one that was given before.
    samples.add([(14 * second, 50), (13 * second, 100), (13 * second + 500_000, 100)])
    assert integral.total == pytest.approx(0.5 + 0.25)
    # The buffer holds three seconds: what lies further apart was not sampled in a row.
    samples.add([(18 * second, 100), (19 * second, 20)])
    assert integral.total == pytest.approx(0.75 + 0.2)


class Clock:
    """Seconds, as set."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_busy_time_goes_on_after_the_clock_was_set_back() -> None:
    integral, wall = Integral(), Clock(10_000.0)
    samples = SampledIntegral(0, BUSY_SECONDS, 0.01, integral, wall)
    before = [(10_000_000_000 - 100_000 * i, 100) for i in range(30)]
    samples.add(before)
    wall.now_s -= 3600
    after_us = 6_400_000_000
    samples.check()
    # The driver still has the samples of the time that is to come again.
    samples.add([*before, (after_us, 100)])
    assert integral.total == 0
    samples.check()
    samples.add([*before, (after_us + 500_000, 100)])
    assert integral.total == pytest.approx(0.5)


def test_busy_time_goes_on_after_nothing_new_came_for_longer_than_the_buffer() -> None:
    integral, clock = Integral(), Clock(0.0)
    samples = SampledIntegral(0, BUSY_SECONDS, 0.01, integral, clock=clock)
    samples.add([(100_000_000, 100)])
    for newest in ((), [(50_000_000, 100)], [(50_500_000, 100)]):
        clock.now_s += 2.5
        samples.check()
        samples.add(newest)
    assert integral.total == pytest.approx(0.5)


def test_shares_of_processes_go_on_after_the_clock_was_set_back() -> None:
    wall = Clock(10_000.0)
    use = ProcessUse(wall)
    old = (7, 10_000_000_000, 80, 0, 0, 0)
    assert use.shares([old]) == {7: 0.8}
    wall.now_s -= 3600
    assert use.shares([old, (7, 6_400_000_000, 20, 0, 0, 0)]) == {7: 0.2}


def test_where_there_are_no_samples_utilization_is_integrated(process: Stepper) -> None:
    fake = process.begin("h100", load=100)
    fake.fail("nvmlDeviceGetSamples", 3)
    first = process.step()["busy_seconds_total"]
    time.sleep(0.3)
    assert process.step()["busy_seconds_total"] - first >= 0.3
    assert process.calls("nvmlDeviceGetSamples") <= 2


def test_a_reader_that_is_dear_is_called_seldom_until_it_is_cheap(process: Stepper) -> None:
    name = "nvmlDeviceGetUtilizationRates"
    fake = process.begin("h100")
    process.step()
    fake.slow(name, 8000)
    process.step(6)
    before = process.calls(name)
    values = process.step(4 * SLOW)
    assert process.calls(name) == before + 4
    assert "utilization_ratio" in values
    fake.slow(name, 0)
    process.step(8 * SLOW)
    before = process.calls(name)
    process.step(SLOW)
    assert process.calls(name) == before + SLOW


def test_processes_are_listed_once_with_what_is_known_of_them(process: Stepper) -> None:
    fake = process.begin("h100", load=60)
    fake.processes(0, "self/1000/C", "self/1000/G", "4000001/na/C", "4000002/50/M")
    time.sleep(0.4)
    process.step(SLOW)
    by_memory = {p[2]: p for p in process.gpu["processes"]}
    assert by_memory.keys() == {1000 * 2**20, None, 50 * 2**20}
    assert by_memory[1000 * 2**20][1].startswith("python")
    assert by_memory[None][:2] == [4000001, ""]
    assert by_memory[50 * 2**20][3] == pytest.approx(0.15)


def test_a_list_longer_than_its_room_is_read_again(process: Stepper) -> None:
    fake = process.begin("h100")
    fake.processes(0, *(f"{5_000_000 + i}/1/C" for i in range(32)))
    process.step(2)
    assert len(process.gpu["processes"]) == 32
