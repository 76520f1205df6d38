"""The nvml source when calls hang while the driver goes, and when nothing can be read at all."""

from __future__ import annotations

import time
from pathlib import Path

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_watched import Watched, watched
from tests.devices.recording import wait_until
from warpwatch_devices.nvml.last_resort import LastResort

BLOCKED = (
    "a stuck driver call prevents NVML from being restarted in this process; "
    "restarting the daemon helps"
)


def calls(driver: FakeDriver, gpu: int | None, function: str) -> int:
    return driver.calls().get(gpu, {}).get(function, 0)


def reload(driver: FakeDriver, watch: Watched, gpu: int = 0) -> None:
    driver.set(driver_gone=1)
    wait_until(lambda: watch.reason(gpu) == "driver")
    driver.set(driver_gone=None)


def test_after_calls_of_gpm_and_events_that_hung_and_returned_a_new_driver_is_found(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment) as watch:
        wait_until(lambda: watch.all_up() and "sm_active_ratio" in watch.newest(1)["values"])
        fake_driver.hang("nvmlGpmSampleGet", gpu=1)
        fake_driver.hang("nvmlEventSetWait_v2")
        wait_until(lambda: watch.log.count("does not return") == 2)
        fake_driver.hang("nvmlGpmSampleGet", gpu=1, on=False)
        fake_driver.hang("nvmlEventSetWait_v2", on=False)
        time.sleep(0.1)
        reload(fake_driver, watch)
        wait_until(watch.all_up)
        assert watch.failures() == []


def test_a_call_that_hangs_across_a_reload_keeps_nvml_down_until_it_returns(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment, mismatch_grace_s=60) as watch:
        wait_until(watch.all_up)
        fake_driver.hang("nvmlDeviceGetUtilizationRates", gpu=1)
        wait_until(lambda: watch.reason(1) == "stuck")
        shutdowns = calls(fake_driver, None, "nvmlShutdown")
        reload(fake_driver, watch)
        wait_until(lambda: watch.health().get("reason", "").endswith(BLOCKED))
        assert not watch.health()["up"]
        fake_driver.hang("nvmlDeviceGetUtilizationRates", gpu=1, on=False)
        wait_until(watch.all_up)
        assert calls(fake_driver, None, "nvmlShutdown") > shutdowns
        assert watch.failures() == []


def test_a_call_that_hangs_across_a_reload_for_long_ends_the_daemon(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment, mismatch_grace_s=0.6) as watch:
        wait_until(watch.all_up)
        fake_driver.hang("nvmlDeviceGetUtilizationRates", gpu=1)
        wait_until(lambda: watch.reason(1) == "stuck")
        reload(fake_driver, watch)
        wait_until(watch.failures)
        assert watch.failures() == [BLOCKED]
        # Of no use while the call is inside, and dangerous: the last user's shutdown frees all.
        inits = calls(fake_driver, None, "nvmlInitWithFlags")
        assert calls(fake_driver, None, "nvmlShutdown") < inits


def test_an_upgrade_beside_a_call_that_hangs_ends_the_daemon(fake_driver: FakeDriver) -> None:
    with watched(fake_driver.environment, mismatch_grace_s=0.4) as watch:
        wait_until(watch.all_up)
        fake_driver.hang("nvmlDeviceGetUtilizationRates", gpu=1)
        wait_until(lambda: watch.reason(1) == "stuck")
        fake_driver.set(version_mismatch=1)
        wait_until(watch.failures)
        assert watch.failures()[0].startswith("the NVIDIA driver was upgraded under this process")


def test_nvml_is_not_shut_down_under_a_call(fake_driver: FakeDriver) -> None:
    function = "nvmlDeviceGetUtilizationRates"
    # Long inside, and not yet taken to be stuck.
    with watched(fake_driver.environment, stuck_after_s=60) as watch:
        wait_until(watch.all_up)
        fake_driver.hang(function, gpu=1)
        wait_until(lambda: time.time() - watch.newest(1)["time"] > 0.5)
        fake_driver.set(driver_gone=1)
        wait_until(lambda: watch.reason(0) == "driver")
        time.sleep(0.5)
        assert calls(fake_driver, None, "nvmlShutdown") == 0
        fake_driver.hang(function, gpu=1, on=False)
        wait_until(lambda: calls(fake_driver, None, "nvmlShutdown"))


def test_a_search_that_comes_back_late_begins_nothing(fake_nvml: Path, tmp_path: Path) -> None:
    fake = FakeDriver(fake_nvml, tmp_path / "state", profile="a100", gpus=2)
    with watched(fake.environment) as watch:
        wait_until(lambda: watch.up() == {0, 1})
        fake.hang("nvmlDeviceGetUUID", gpu=2)
        fake.set(gpus=3)
        wait_until(lambda: calls(fake, 2, "nvmlDeviceGetUUID"))
        # One call says that NVML is to be initialised again, which is only counted.
        fake.fail("nvmlDeviceGetMemoryInfo_v2", 1, gpu=0)
        wait_until(lambda: watch.reason(0) == "driver")
        fake.fail("nvmlDeviceGetMemoryInfo_v2", 0, gpu=0)
        wait_until(lambda: watch.newest(0)["up"])
        fake.hang("nvmlDeviceGetUUID", gpu=2, on=False)
        wait_until(lambda: watch.up() == {0, 1, 2})
        time.sleep(0.5)

        def rounds() -> tuple[int, int]:
            other, it = (calls(fake, gpu, "nvmlDeviceGetMemoryInfo_v2") for gpu in (1, 2))
            return other, it

        before = rounds()
        wait_until(lambda: rounds()[0] >= before[0] + 12)
        # It has one loop, as the other one has.
        assert rounds()[1] - before[1] <= 15


def test_devices_that_answer_nothing_any_more_end_the_daemon_once(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment, mismatch_grace_s=0.6) as watch:
        wait_until(watch.all_up)
        fake_driver.set(unknown=1)
        wait_until(lambda: "no GPU can be read any more" in watch.health().get("reason", ""))
        assert not watch.health()["up"]
        assert watch.failures() == []
        wait_until(watch.failures)
        time.sleep(0.3)
        assert len(watch.failures()) == 1
        assert "the container lost its devices" in watch.failures()[0]
        fake_driver.clear()
        wait_until(lambda: watch.all_up() and watch.health()["up"])


def test_devices_that_may_not_be_read_or_never_could_end_nothing(
    fake_nvml: Path, tmp_path: Path
) -> None:
    fake = FakeDriver(fake_nvml, tmp_path / "state", gpus=2)
    fake.set(0, unknown=1)
    fake.set(1, unknown=1)
    with watched(fake.environment, mismatch_grace_s=0) as watch:
        wait_until(lambda: watch.samples("unknown-1"))
        time.sleep(0.5)
        assert watch.health()["up"]
        assert watch.failures() == []
        fake.clear()
        wait_until(lambda: watch.up() == {0, 1})
        fake.set(no_permission=1)
        wait_until(lambda: watch.reason(0) == watch.reason(1) == "no_permission")
        time.sleep(0.3)
        assert watch.failures() == []


def test_a_device_that_comes_or_goes_beside_a_stuck_one_is_noticed(
    fake_nvml: Path, tmp_path: Path
) -> None:
    fake = FakeDriver(fake_nvml, tmp_path / "state", gpus=4)
    with watched(fake.environment) as watch:
        wait_until(lambda: watch.up() == {0, 1, 2, 3})
        fake.hang(gpu=1)
        wait_until(lambda: watch.reason(1) == "stuck")
        fake.set(3, absent=1)
        wait_until(lambda: watch.reason(3) == "lost" and watch.up() == {0, 2})
        fake.set(3, absent=0)
        wait_until(lambda: watch.up() == {0, 2, 3})
        assert watch.reason(1) == "stuck"
        # Another one goes from before the stuck one, which has its index then.
        fake.set(0, absent=1)
        wait_until(lambda: watch.newest(3)["index"] == 2 and watch.up() == {2, 3})
        fake.hang(gpu=1, on=False)
        wait_until(lambda: watch.up() == {1, 2, 3})
        wait_until(lambda: [watch.newest(gpu)["index"] for gpu in (1, 2, 3)] == [0, 1, 2])


def test_a_search_that_hangs_is_reported_and_is_replaced(fake_nvml: Path, tmp_path: Path) -> None:
    fake = FakeDriver(fake_nvml, tmp_path / "state", gpus=2)
    with watched(fake.environment) as watch:
        wait_until(lambda: watch.up() == {0, 1})
        fake.hang("nvmlDeviceGetUUID", gpu=2)
        fake.set(gpus=4)
        wait_until(lambda: "the search for devices" in watch.health().get("reason", ""))
        assert watch.health()["up"]
        wait_until(lambda: watch.up() == {0, 1, 3})
        fake.clear()
        fake.set(gpus=4)
        wait_until(lambda: watch.up() == {0, 1, 2, 3} and watch.health()["reason"] == "")


def test_a_device_that_never_reported_its_name_is_forgotten_when_it_goes(
    fake_nvml: Path, tmp_path: Path
) -> None:
    fake = FakeDriver(fake_nvml, tmp_path / "state", gpus=3)
    fake.set(2, lost=1)

    def last_of_unknown(watch: Watched) -> str:
        about = [
            line
            for line in list(watch.lines)
            if "unknown-2" in (line.get("device"), line.get("forget"))
        ]
        return "forgotten" if about and "forget" in about[-1] else "there"

    with watched(fake.environment) as watch:
        wait_until(lambda: watch.samples("unknown-2") and watch.up() == {0, 1})
        fake.set(2, absent=1)
        wait_until(lambda: last_of_unknown(watch) == "forgotten")
        fake.set(2, absent=0)
        wait_until(lambda: last_of_unknown(watch) == "there")
        fake.set(driver_gone=1)
        wait_until(lambda: last_of_unknown(watch) == "forgotten")
        reported = len(watch.lines)
        wait_until(lambda: len(watch.lines) > reported + 20)
        assert last_of_unknown(watch) == "forgotten"


def test_events_that_are_not_watched_any_more_are_reported(fake_driver: FakeDriver) -> None:
    with watched(fake_driver.environment) as watch:
        wait_until(watch.all_up)
        fake_driver.fail("nvmlEventSetWait_v2", 3)
        wait_until(lambda: "not watched through NVML" in watch.health().get("reason", ""))
        assert watch.health()["up"] and watch.all_up()
        time.sleep(0.3)
        assert watch.log.count("not watched through NVML") == 1


def test_what_breaks_off_begins_its_time_again() -> None:
    failures: list[str] = []
    times = iter([0.0, 60.0, 60.0, 119.0, 120.0, 121.0])
    last_resort = LastResort(failures.append, grace_s=60.0, clock=lambda: next(times))
    for ailment in ("first", "", "first", "first"):
        last_resort.consider(ailment)
    assert failures == []
    last_resort.consider("first")
    last_resort.consider("first")
    assert failures == ["first"]
