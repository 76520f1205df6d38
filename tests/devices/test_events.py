"""XIDs and health events from a fake driver: each once, of every GPU, whatever becomes of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_parts import PartsProcess, running

DOUBLE_BIT_ECC = 0x2
RECOVERY_ACTION = 0x8000
FIRST_BUS = 0x18


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012d}"


def reported(state: dict[str, Any], gpu: int) -> dict[str, float]:
    values: dict[str, float] = state["ledger"].get(uuid(gpu), {})
    return values


def xid(state: dict[str, Any], gpu: int, number: int) -> float | None:
    return reported(state, gpu).get(f"xid_errors_total{{xid={number}}}")


def watched(process: PartsProcess, *gpus: int) -> None:
    """Until the events of these GPUs are registered: their counters are there, at 0."""
    process.until(lambda state: all(xid(state, gpu, 79) == 0 for gpu in gpus))


def waits(driver: FakeDriver) -> int:
    return driver.calls().get(None, {}).get("nvmlEventSetWait_v2", 0)


def calls(driver: FakeDriver, gpu: int, function: str) -> int:
    return driver.calls().get(gpu, {}).get(function, 0)


def pause(process: PartsProcess, seconds: float) -> None:
    begun = process.state["time"]
    process.until(lambda state: state["time"] > begun + seconds)


def write_line(log: Path, gpu: int, number: int) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"4,7,8,-;NVRM: Xid (PCI:0000:{FIRST_BUS + gpu:02x}:00): {number}, pid=1\n")


def test_an_event_and_its_line_in_the_kernel_log_count_once(fake_driver, tmp_path):
    log = tmp_path / "kmsg"
    log.touch()
    fake_driver.set(gpus=2)
    with running(fake_driver, events=True, kernel_log=str(log)) as process:
        watched(process, 0, 1)
        fake_driver.xid(1, 31)
        write_line(log, 1, 31)
        process.until(lambda state: xid(state, 1, 31))
        write_line(log, 1, 48)
        state = process.until(lambda state: xid(state, 1, 48) == 1)
        assert xid(state, 1, 31) == 1
        assert xid(state, 0, 31) is None and xid(state, 0, 48) == 0
        assert reported(state, 1)["xid_last_timestamp_seconds{xid=31}"] > 1.7e9


def test_every_event_counts_for_its_gpu_and_kind(fake_driver):
    fake_driver.set(gpus=2)
    with running(fake_driver, events=True) as process:
        watched(process, 0, 1)
        assert reported(process.state, 0)["health_events_total{event=double_bit_ecc}"] == 0
        for _ in range(3):
            fake_driver.xid(0, 13)
        fake_driver.xid(1, 13, instances=(1, 0))
        fake_driver.event(0, DOUBLE_BIT_ECC, 0)
        fake_driver.event(1, RECOVERY_ACTION, 1)
        state = process.until(
            lambda state: reported(state, 1).get("health_events_total{event=recovery_action}") == 1
        )
        assert (xid(state, 0, 13), xid(state, 1, 13)) == (3, 1)
        assert reported(state, 0)["health_events_total{event=double_bit_ecc}"] == 1
        assert reported(state, 1)["health_events_total{event=double_bit_ecc}"] == 0


def test_a_gpu_that_is_registered_again_is_in_a_new_set_and_counts_once(fake_driver):
    fake_driver.set(gpus=2)
    with running(fake_driver, events=True) as process:
        watched(process, 0, 1)
        sets = fake_driver.calls()[None]["nvmlEventSetCreate"]
        registered = fake_driver.calls()[1]["nvmlDeviceRegisterEvents"]
        process.tell("again")
        process.until(lambda _: fake_driver.calls()[None]["nvmlEventSetCreate"] > sets)
        process.until(lambda _: fake_driver.calls()[1]["nvmlDeviceRegisterEvents"] > registered)
        # The second GPU may have come just after the new set, which is built once more then.
        begun = process.state["time"]
        process.until(lambda state: state["time"] > begun + 0.7)
        fake_driver.xid(0, 13)
        fake_driver.xid(1, 31)
        state = process.until(lambda state: xid(state, 1, 31))
        assert (xid(state, 0, 13), xid(state, 1, 31)) == (1, 1)


def test_a_gpu_that_comes_back_often_costs_the_others_one_new_set(fake_driver):
    fake_driver.set(gpus=2)
    with running(fake_driver, events=True) as process:
        watched(process, 0, 1)
        sets = fake_driver.calls()[None]["nvmlEventSetCreate"]
        for _ in range(6):
            process.tell("register", uuid(1))
            pause(process, 0.15)
        asked = calls(fake_driver, 1, "nvmlDeviceGetSupportedEventTypes")
        assert asked == 7
        assert fake_driver.calls()[None]["nvmlEventSetCreate"] == sets + 1
        fake_driver.xid(0, 13)
        fake_driver.xid(1, 31)
        state = process.until(lambda state: xid(state, 0, 13) and xid(state, 1, 31))
        assert (xid(state, 0, 13), xid(state, 1, 31)) == (1, 1)


def test_that_nothing_is_watched_any_more_is_reported_once(fake_driver):
    fake_driver.set(gpus=1)
    with running(fake_driver, events=True) as process:
        watched(process, 0)
        assert process.state["trouble"] == ""
        fake_driver.fail("nvmlEventSetWait_v2", 4)
        state = process.until(lambda state: state["trouble"])
        assert "not watched through NVML any more: Insufficient Permissions" in state["trouble"]
        pause(process, 0.7)
        process.close()
    assert process.log.count("not watched") == 1


def test_gpus_are_registered_for_what_they_support(fake_driver):
    fake_driver.set(gpus=4)
    fake_driver.set(1, profile="v100")
    fake_driver.fail("nvmlDeviceGetSupportedEventTypes", 3, gpu=2)
    fake_driver.fail("nvmlDeviceRegisterEvents", 999, gpu=3)
    with running(fake_driver, events=True) as process:
        watched(process, 0, 1)
        events = [name for name in reported(process.state, 1) if name.startswith("health")]
        assert events == [
            "health_events_total{event=single_bit_ecc}",
            "health_events_total{event=double_bit_ecc}",
        ]
        assert len([name for name in reported(process.state, 0) if name.startswith("health")]) == 9
        assert reported(process.state, 2) == {} and reported(process.state, 3) == {}
        fake_driver.xid(1, 13)
        process.until(lambda state: xid(state, 1, 13) == 1)
    assert "nvmlDeviceRegisterEvents" not in fake_driver.calls()[2]
    assert fake_driver.calls()[3]["nvmlDeviceRegisterEvents"] == 1
    # An unknown error leaves the set in an undefined state: there was another one after it.
    assert fake_driver.calls()[None]["nvmlEventSetCreate"] >= 2


def test_a_lost_gpu_neither_spins_nor_hides_the_others(fake_driver):
    fake_driver.set(gpus=3)
    with running(fake_driver, events=True) as process:
        watched(process, 0, 1, 2)
        fake_driver.set(1, lost=1)
        begun = process.until(lambda state: xid(state, 1, 79) == 1)["time"]
        before = waits(fake_driver)
        process.tell("forget", uuid(1))
        process.until(lambda state: state["errors"].get("nvml_errors_total events gpu_is_lost"))
        for _ in range(3):
            fake_driver.xid(0, 13)
            fake_driver.xid(2, 31)
        process.until(lambda state: xid(state, 0, 13) == xid(state, 2, 31) == 3)
        elapsed_s = process.state["time"] - begun
        # Two waits a second and two for each of the events; a loop that spins makes thousands.
        assert waits(fake_driver) - before < 20 + 4 * elapsed_s
        fake_driver.set(1, lost=None)
        registrations = fake_driver.calls()[1]["nvmlDeviceRegisterEvents"]
        process.tell("again")
        process.until(lambda _: fake_driver.calls()[1]["nvmlDeviceRegisterEvents"] > registrations)
        fake_driver.xid(1, 94)
        state = process.until(lambda state: xid(state, 1, 94) == 1)
        assert xid(state, 1, 79) == 1
        counted = state["errors"]["nvml_calls_total event_wait"]
        assert before / 2 < counted <= waits(fake_driver)


def test_a_set_in_an_unknown_state_is_built_again_with_back_off(fake_driver):
    fake_driver.set(gpus=1)
    with running(fake_driver, events=True) as process:
        watched(process, 0)
        fake_driver.fail("nvmlEventSetWait_v2", 999)
        state = process.until(
            lambda state: state["errors"].get("nvml_errors_total events unknown", 0) >= 2
        )
        before, begun = waits(fake_driver), state["time"]
        process.until(lambda state: state["time"] > begun + 0.7)
        assert waits(fake_driver) - before <= 1
        fake_driver.fail("nvmlEventSetWait_v2", 0)
        builds = fake_driver.calls()[0]["nvmlDeviceRegisterEvents"]
        process.until(
            lambda _: (
                fake_driver.calls()[0]["nvmlDeviceRegisterEvents"] > builds
                or waits(fake_driver) > before + 1
            )
        )
        fake_driver.xid(0, 43)
        process.until(lambda state: xid(state, 0, 43) == 1)
        assert process.log == "" or "Traceback" not in process.log
    calls = fake_driver.calls()[None]
    assert calls["nvmlEventSetCreate"] == calls["nvmlEventSetFree"]


def test_a_gpu_whose_registration_never_returns_costs_its_own_events(fake_driver):
    fake_driver.set(gpus=2)
    fake_driver.hang("nvmlDeviceRegisterEvents", gpu=0)
    with running(fake_driver, events=True) as process:
        watched(process, 1)
        fake_driver.xid(1, 74)
        state = process.until(lambda state: xid(state, 1, 74) == 1)
        assert reported(state, 0) == {}
        process.close()
    assert process.log.count("does not return") == 1


def test_a_wait_that_never_returns_ends_when_nvml_does_again(fake_driver):
    fake_driver.set(gpus=1)
    with running(fake_driver, events=True) as process:
        watched(process, 0)
        fake_driver.hang("nvmlEventSetWait_v2")
        process.until(lambda _: "the wait of the event set does not return" in process.log)
        fake_driver.hang("nvmlEventSetWait_v2", on=False)
        process.until(lambda _: fake_driver.calls()[0]["nvmlDeviceRegisterEvents"] >= 2)
        fake_driver.xid(0, 63)
        process.until(lambda state: xid(state, 0, 63) == 1)
