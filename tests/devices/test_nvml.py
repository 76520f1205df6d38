"""The nvml source on a fake driver with eight GPUs, in a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_watched import Watched, uuid, watched
from tests.devices.recording import wait_until
from warpwatch_devices.nvml.library import Meaning, meaning_of, name_of


def test_with_everything_on_a_gpu_costs_at_most_twelve_calls_a_round(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment, interval_s=0.15) as watch:
        wait_until(watch.all_up)
        wait_until(lambda: any("sm_active_ratio" in s["values"] for s in watch.samples(uuid(4))))
        first, before = len(watch.samples(uuid(4))), sum(fake_driver.calls()[4].values())
        wait_until(lambda: len(watch.samples(uuid(4))) >= first + 12)
        rounds = len(watch.samples(uuid(4))) - first
        calls = sum(fake_driver.calls()[4].values()) - before
        counted = [line for line in watch.lines if line.get("count") == "nvml_calls_total"]
    assert calls / rounds <= 12
    assert {line["labels"][0] for line in counted} >= {"fields", "memory", "processes"}


def test_mig_instances_have_the_hardware_counters_of_their_part(
    fake_nvml: Path, tmp_path: Path
) -> None:
    fake = FakeDriver(fake_nvml, tmp_path / "state", profile="h100", gpus=1)
    fake.mig(0, "0=3g.40gb/1/0", "2=2g.20gb/5/0", "5=2g.20gb/5/1")
    with watched(fake.environment) as watch:
        wait_until(lambda: len(_counting(watch)) == 2)
        names = {watch.samples(device)[-1]["gpu_instance"] for device in _counting(watch)}
        assert names == {"1", "5"}


def _counting(watch: Watched) -> set[str]:
    """The MIG devices that have reported SM activity."""
    return {
        line["device"]
        for line in list(watch.lines)
        if line.get("gpu_instance") and "sm_active_ratio" in line["values"]
    }


def test_three_gpus_fail_in_three_ways_and_the_others_keep_their_rate(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment) as watch:
        wait_until(watch.all_up)
        fake_driver.set(3, lost=1)
        fake_driver.hang(gpu=5)
        fake_driver.set(6, no_permission=1)
        wait_until(lambda: watch.reason(5) == "stuck")
        wait_until(lambda: watch.reason(3) == "lost")
        wait_until(lambda: watch.reason(6) == "no_permission")
        since = time.time()
        others = (0, 1, 2, 4, 7)
        wait_until(lambda: all(len(watch.good_times(gpu, since)) >= 15 for gpu in others))
        gaps_s = [statistics.median(_gaps(watch.good_times(gpu, since))) for gpu in others]
        assert gaps_s == pytest.approx([0.1] * 5, rel=0.1)
        values = [watch.newest(gpu)["values"] for gpu in (3, 5, 6)]
        assert not [
            name for of in values for name in of if "xid" not in name and "health" not in name
        ]
        assert watch.health()["up"]
        fake_driver.clear()
        wait_until(watch.all_up)


def _gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def test_a_lost_gpu_still_tells_its_xid(fake_driver: FakeDriver) -> None:
    with watched(fake_driver.environment) as watch:
        # Counted from 0 on as soon as the driver was asked to tell.
        wait_until(lambda: watch.newest(2).get("values", {}).get("xid_errors_total{xid=79}") == 0)
        fake_driver.set(2, lost=1)
        wait_until(lambda: watch.newest(2)["values"].get("xid_errors_total{xid=79}") == 1)
        assert watch.reason(2) == "lost"


def test_a_gpu_that_hangs_from_the_start_is_known_by_its_index(fake_driver: FakeDriver) -> None:
    fake_driver.hang(gpu=5)
    with watched(fake_driver.environment) as watch:
        wait_until(lambda: watch.samples("unknown-5"))
        wait_until(lambda: watch.up() == {0, 1, 2, 3, 4, 6, 7})
        fake_driver.clear()
        wait_until(watch.all_up)
        assert any(line.get("forget") == "unknown-5" for line in list(watch.lines))


def test_a_device_that_answers_nothing_is_a_drivers_fault(fake_driver: FakeDriver) -> None:
    with watched(fake_driver.environment) as watch:
        wait_until(watch.all_up)
        fake_driver.set(1, unknown=1)
        wait_until(lambda: watch.reason(1) == "driver")
        assert watch.newest(0)["up"]


def test_a_gpu_that_vanishes_is_lost_and_is_found_again_at_another_index(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment) as watch:
        wait_until(watch.all_up)
        fake_driver.set(2, absent=1)
        wait_until(lambda: watch.reason(2) == "lost" and watch.newest(7)["index"] == 6)
        wait_until(lambda: watch.up() == {0, 1, 3, 4, 5, 6, 7})
        busy_s = watch.newest(7)["values"]["busy_seconds_total"]
        fake_driver.set(order="7 0 1 2 3 4 5 6")
        fake_driver.set(2, absent=0)
        wait_until(watch.all_up)
        wait_until(lambda: watch.newest(7)["index"] == 0 and watch.newest(2)["index"] == 3)
        # It moved, and counts on.
        assert watch.newest(7)["values"]["busy_seconds_total"] >= busy_s > 0


def test_a_gpu_that_is_plugged_in_is_noticed(fake_nvml: Path, tmp_path: Path) -> None:
    fake = FakeDriver(fake_nvml, tmp_path / "state", gpus=7)
    with watched(fake.environment) as watch:
        wait_until(lambda: len(watch.up()) == 7)
        fake.set(gpus=8)
        wait_until(watch.all_up)


def test_without_a_driver_the_source_waits_and_comes_up_by_itself(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    environment = fake_driver.environment | {"LD_LIBRARY_PATH": str(folder)}
    with watched(environment) as watch:
        wait_until(lambda: watch.health())
        health = watch.health()
        assert not health["up"]
        assert health["reason"].startswith("libnvidia-ml.so.1 not found: install the NVIDIA driver")
        library = fake_driver.library / "libnvidia-ml.so.1"
        (folder / "libnvidia-ml.so.1").symlink_to(library)
        wait_until(watch.all_up)
        wait_until(lambda: watch.health()["up"])


def test_a_library_that_does_not_come_back_is_reported(fake_driver: FakeDriver) -> None:
    fake_driver.hang("nvmlInitWithFlags")
    with watched(fake_driver.environment) as watch:
        wait_until(lambda: watch.health().get("reason") == "NVML does not answer")
        fake_driver.clear()
        wait_until(watch.all_up)


def test_the_library_may_be_named_by_its_file(fake_driver: FakeDriver, tmp_path: Path) -> None:
    other = tmp_path / "driver.so"
    other.write_bytes((fake_driver.library / "libnvidia-ml.so.1").read_bytes())
    environment = fake_driver.environment | {
        "LD_LIBRARY_PATH": "",
        "WARPWATCH_NVML_LIBRARY": str(other),
    }
    with watched(environment) as watch:
        wait_until(watch.all_up)


def test_a_driver_that_goes_away_takes_the_devices_down_until_it_is_back(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment) as watch:
        wait_until(watch.all_up)
        fake_driver.set(driver_gone=1)
        wait_until(lambda: "Driver Not Loaded" in watch.health().get("reason", ""))
        wait_until(lambda: {watch.reason(gpu) for gpu in range(8)} == {"driver"})
        fake_driver.set(driver_gone=None, driver_version="615.71.05")
        wait_until(watch.all_up)
        assert watch.newest(0)["info"]["driver_version"] == "615.71.05"


def test_devices_that_the_watchdog_has_not_seen_yet_go_down_with_the_driver(
    fake_driver: FakeDriver,
) -> None:
    with watched(fake_driver.environment, mode="by_hand") as watch:
        watch.run("nvml", *(f"nvml-{gpu}" for gpu in range(8)))
        assert watch.all_up()
        fake_driver.set(driver_gone=1)
        while watch.newest(0)["up"]:
            watch.run("nvml-0")
        watch.run("nvml", "nvml-watchdog")
        assert {watch.reason(gpu) for gpu in range(8)} == {"driver"}


def test_a_driver_of_another_version_is_reported_and_then_ends_the_daemon_once(
    fake_driver: FakeDriver,
) -> None:
    def failures() -> list[str]:
        return [line["fail"] for line in list(watch.lines) if "fail" in line]

    with watched(fake_driver.environment, mismatch_grace_s=0.4) as watch:
        wait_until(watch.all_up)
        fake_driver.set(version_mismatch=1)
        wait_until(lambda: "different driver versions" in watch.health().get("reason", ""))
        assert failures() == []
        assert "the daemon ends after 0.4 s of it" in watch.health()["reason"]
        wait_until(failures)
        time.sleep(0.3)
        assert failures() == [
            "the NVIDIA driver was upgraded under this process: kernel module and library differ; "
            "restarting picks the new library up"
        ]


def test_versions_that_agree_again_in_time_end_nothing(fake_driver: FakeDriver) -> None:
    with watched(fake_driver.environment, mismatch_grace_s=30) as watch:
        wait_until(watch.all_up)
        fake_driver.set(version_mismatch=1)
        wait_until(lambda: "different driver versions" in watch.health().get("reason", ""))
        fake_driver.clear()
        wait_until(watch.all_up)
        assert not [line for line in watch.lines if "fail" in line]


def test_a_library_that_was_exchanged_on_disk_is_kept_apart_from_one_that_was_not(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    mapped = tmp_path / "libnvidia-ml.so.1"
    mapped.write_bytes((fake_driver.library / mapped.name).read_bytes())
    program = (
        "import ctypes, pathlib, sys\n"
        "from warpwatch_devices.nvml.library import library_replaced\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "library = ctypes.CDLL(str(path))\n"
        "before = library_replaced()\n"
        "path.rename(path.with_suffix('.old'))\n"
        "path.with_suffix('.old').unlink()\n"
        "path.write_bytes(b'new')\n"
        "print(before, library_replaced())\n"
    )
    command = [sys.executable, "-c", program, str(mapped)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout == "False True\n"


@pytest.mark.parametrize(
    ("code", "meaning", "name"),
    [
        (3, Meaning.UNSUPPORTED, "not_supported"),
        (13, Meaning.UNSUPPORTED, "function_not_found"),
        (25, Meaning.UNSUPPORTED, "argument_version_mismatch"),
        (4, Meaning.NO_PERMISSION, "no_permission"),
        (6, Meaning.EMPTY, "not_found"),
        (1, Meaning.LIBRARY, "uninitialized"),
        (9, Meaning.LIBRARY, "driver_not_loaded"),
        (18, Meaning.LIBRARY, "lib_rm_version_mismatch"),
        (15, Meaning.LOST, "gpu_is_lost"),
        (28, Meaning.LOST, "gpu_not_found"),
        (16, Meaning.RESET_REQUIRED, "reset_required"),
        (999, Meaning.UNKNOWN, "unknown"),
        (12345, Meaning.UNKNOWN, "12345"),
    ],
)
def test_return_codes_mean_what_the_policy_says(code: int, meaning: Meaning, name: str) -> None:
    assert meaning_of(code) is meaning
    assert name_of(code) == name
