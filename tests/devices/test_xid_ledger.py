"""XIDs are counted once, whoever tells of them, and belong to the right GPU."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.manual_clock import ManualClock
from warpwatch_devices.xid_ledger import XidLedger, normalised_address

GPU = "GPU-1a"
ADDRESS = "00000000:1A:00.0"
LOG_ADDRESS = "0000:1a:00"


def ledger_with_gpu() -> tuple[XidLedger, ManualClock]:
    clock = ManualClock()
    ledger = XidLedger(clock.wall)
    ledger.register(GPU, ADDRESS)
    return ledger, clock


def total(ledger: XidLedger, xid: int, uuid: str = GPU) -> float | None:
    return ledger.values(uuid).get(("device_xid_errors_total", (str(xid),)))


@pytest.mark.parametrize(
    "spelling",
    ["00000000:1A:00.0", "0000:1a:00.0", "0000:1a:00", "1A:00.0", "0:1a:0", " 0000:1A:00 "],
)
def test_every_spelling_of_a_pci_address_is_the_same_gpu(spelling):
    assert normalised_address(spelling) == "0000:1a:00"


def test_addresses_differ_by_domain_and_bus():
    assert normalised_address("00010000:1A:00.0") == "10000:1a:00"
    assert normalised_address("0000:1b:00") == "0000:1b:00"
    assert normalised_address("N/A") == "N/A"


def test_an_event_and_its_line_in_the_kernel_log_are_one():
    ledger, clock = ledger_with_gpu()
    assert ledger.observe(ADDRESS, 79, "nvml") is True
    clock.advance(4.9)
    assert ledger.observe(LOG_ADDRESS, 79, "kernel_log") is False
    assert total(ledger, 79) == 1


def test_the_log_may_be_first():
    ledger, _ = ledger_with_gpu()
    assert ledger.observe(LOG_ADDRESS, 31, "kernel_log") is True
    assert ledger.observe(ADDRESS, 31, "nvml") is False
    assert total(ledger, 31) == 1


def test_two_of_one_origin_are_two():
    ledger, _ = ledger_with_gpu()
    reported = [ledger.observe(ADDRESS, 13, "nvml") for _ in range(2)]
    reported += [ledger.observe(LOG_ADDRESS, 13, "kernel_log") for _ in range(3)]
    assert reported == [True, True, False, False, True]
    assert total(ledger, 13) == 3


def test_what_is_reported_too_late_is_another_event():
    ledger, clock = ledger_with_gpu()
    ledger.observe(ADDRESS, 13, "nvml")
    clock.advance(5.1)
    assert ledger.observe(LOG_ADDRESS, 13, "kernel_log") is True
    assert total(ledger, 13) == 2


def test_other_numbers_and_other_gpus_are_other_events():
    ledger, _ = ledger_with_gpu()
    ledger.register("GPU-1b", "00000000:1B:00.0")
    ledger.observe(ADDRESS, 13, "nvml")
    assert ledger.observe(LOG_ADDRESS, 43, "kernel_log") is True
    assert ledger.observe("0000:1b:00", 13, "kernel_log") is True
    assert (total(ledger, 13), total(ledger, 43), total(ledger, 13, "GPU-1b")) == (1, 1, 1)


def test_the_time_is_that_of_the_last_one():
    ledger, clock = ledger_with_gpu()
    ledger.observe(ADDRESS, 31, "nvml")
    clock.advance(100)
    ledger.observe(ADDRESS, 31, "nvml")
    assert ledger.values(GPU) == {
        ("device_xid_errors_total", ("31",)): 2,
        ("device_xid_last_timestamp_seconds", ("31",)): 1_700_000_100.0,
    }


def test_an_xid_before_its_gpu_is_known_is_kept_for_it():
    ledger = XidLedger(ManualClock().wall)
    assert ledger.observe(LOG_ADDRESS, 143, "kernel_log") is True
    assert ledger.values(GPU) == {}
    ledger.register(GPU, ADDRESS)
    assert total(ledger, 143) == 1


def test_what_is_kept_for_unknown_gpus_is_bounded():
    ledger = XidLedger(ManualClock().wall)
    for bus in range(256):
        for domain in range(4):
            ledger.observe(f"{domain:04x}:{bus:02x}:00", 13, "kernel_log")
    for xid in range(1, 1000):
        ledger.observe("0000:00:00", xid, "kernel_log")
    ledger.register("GPU-first", "0000:00:00")
    ledger.register("GPU-last", "0003:ff:00")
    assert len(ledger.values("GPU-first")) == 2 * 128
    assert ledger.values("GPU-last") == {}


def test_hardware_trouble_counts_from_0_once_an_origin_works():
    ledger, _ = ledger_with_gpu()
    assert ledger.values(GPU) == {}
    ledger.watched("nvml", GPU)
    assert (total(ledger, 79), total(ledger, 48), total(ledger, 13)) == (0, 0, None)
    assert ("device_xid_last_timestamp_seconds", ("79",)) not in ledger.values(GPU)


def test_a_gpu_that_comes_after_the_log_works_counts_from_0_too():
    ledger = XidLedger(ManualClock().wall)
    ledger.watched("kernel_log")
    ledger.register(GPU, ADDRESS)
    ledger.observe(LOG_ADDRESS, 79, "kernel_log")
    ledger.register(GPU, ADDRESS)
    assert (total(ledger, 79), total(ledger, 74)) == (1, 0)


def test_an_origin_without_xids_starts_no_counter_of_them():
    ledger, _ = ledger_with_gpu()
    ledger.watched("nvml", GPU, xids=False, health=["double_bit_ecc"])
    assert ledger.values(GPU) == {("device_health_events_total", ("double_bit_ecc",)): 0}


def test_health_events_count_by_kind_and_survive_a_new_registration():
    ledger, _ = ledger_with_gpu()
    ledger.observe_health(GPU, "fatal_poison")
    ledger.watched("nvml", GPU, xids=False, health=["fatal_poison", "recovery_action"])
    ledger.observe_health(GPU, "fatal_poison")
    assert ledger.values(GPU) == {
        ("device_health_events_total", ("fatal_poison",)): 2,
        ("device_health_events_total", ("recovery_action",)): 0,
    }


def test_another_gpu_at_the_same_address_starts_afresh():
    ledger, _ = ledger_with_gpu()
    ledger.observe(ADDRESS, 79, "nvml")
    ledger.register("GPU-new", ADDRESS)
    assert ledger.values("GPU-new") == {}
    assert ledger.values(GPU) == {}


def test_a_gpu_that_moved_keeps_its_counters():
    ledger, _ = ledger_with_gpu()
    ledger.observe(ADDRESS, 79, "nvml")
    ledger.register(GPU, "0000:3b:00.0")
    ledger.observe("0000:3b:00", 79, "kernel_log")
    assert total(ledger, 79) == 1
    ledger.observe("0000:3b:00", 79, "kernel_log")
    assert total(ledger, 79) == 2


def test_a_storm_is_logged_once_and_counted_in_full(caplog):
    ledger, clock = ledger_with_gpu()
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            ledger.observe(ADDRESS, 79, "nvml")
    assert [record.getMessage() for record in caplog.records] == [
        "device GPU-1a (0000:1a:00): XID 79, GPU fell off the bus"
    ]
    clock.advance(61)
    ledger.observe(ADDRESS, 79, "nvml")
    assert len(caplog.records) == 2
    assert total(ledger, 79) == 51


def test_no_count_is_lost_between_threads():
    ledger, _ = ledger_with_gpu()

    def tell(origin: str) -> None:
        for _ in range(500):
            ledger.observe(ADDRESS, 13, origin)
            ledger.observe_health(GPU, "single_bit_ecc")
            ledger.values(GPU)

    threads = [threading.Thread(target=tell, args=("nvml",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total(ledger, 13) == 2000
    assert ledger.values(GPU)["device_health_events_total", ("single_bit_ecc",)] == 2000
