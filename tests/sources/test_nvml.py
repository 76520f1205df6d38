"""The nvml source on a fake driver with eight GPUs, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sources.recording import wait_until
from warpwatch.daemon.sources.nvml_library import Meaning, meaning_of

PROCESS = Path(__file__).with_name("nvml_process.py")


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


class Watched:
    """What the source's process has published so far."""

    def __init__(self, process: subprocess.Popen[str], control: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._control = control
        self._process = process
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line) | {"seen": time.monotonic()})

    def control(self, text: str) -> None:
        """Replaced at once, since the driver reads it at any time."""
        new = self._control.with_suffix(".new")
        new.write_text(text)
        new.replace(self._control)

    def samples(self, index: int) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line.get("device") == uuid(index)]

    def newest(self, index: int) -> dict[str, Any]:
        return (self.samples(index) or [{}])[-1]

    def health(self) -> dict[str, Any]:
        return next((line for line in reversed(list(self.lines)) if "source" in line), {})

    def all_up(self) -> bool:
        return all(self.newest(index).get("up") for index in range(8))

    def rate(self, index: int, window_s: float) -> float:
        """Good samples of a device per second in the newest ``window_s``."""
        since = time.monotonic() - window_s
        good = [s for s in self.samples(index) if s["seen"] >= since and s["up"]]
        return len(good) / window_s

    def join(self) -> None:
        self._thread.join(10)


@contextmanager
def watched(tmp_path: Path, **environment: str) -> Iterator[Watched]:
    control = tmp_path / "control"
    control.touch()
    names = {"FAKE_NVML_CONTROL": str(control), **environment}
    process = subprocess.Popen(
        [sys.executable, str(PROCESS)],
        env=os.environ | names,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    watch = Watched(process, control)
    try:
        yield watch
        assert process.poll() is None, "the source's process ended by itself"
    finally:
        process.kill()
        process.wait(10)
        watch.join()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_eight_gpus_tell_what_they_are_and_how_they_are(fake_nvml: Path, tmp_path: Path) -> None:
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(watch.all_up)
        wait_until(lambda: len(watch.samples(2)) > 5)
        sample, pid = watch.newest(2), watch._process.pid
    assert sample["name"] == "NVIDIA H100 80GB HBM3"
    assert sample["info"] == {
        "driver_version": "580.65.06",
        "pci_bus_id": "00000000:1A:00.0",
        "vbios_version": "96.00.74.00.01",
        "serial": "1650000000002",
        "architecture": "Hopper",
    }
    expected = {
        "utilization_ratio": 0.5,
        "memory_used_bytes": 20 * 2**30,
        "memory_reserved_bytes": 2**29,
        "power_watts": 370.0,
        "power_limit_watts": 700.0,
        "temperature_celsius{sensor=gpu}": 42,
        "temperature_celsius{sensor=memory}": 50,
        "clock_hertz{domain=sm}": 1_755_000_000,
        "clock_hertz{domain=memory}": 2_619_000_000,
        "throttle_active{reason=idle}": 1,
        "throttle_active{reason=sw_power_cap}": 0,
        "pcie_replay_total": 0,
        "remapped_rows{type=correctable}": 2,
        "ecc_errors_total{type=uncorrected}": 0,
        "pcie_link_generation_max": 5,
    }
    assert {name: sample["values"].get(name) for name in expected} == expected
    assert [(p[0], p[2]) for p in sample["processes"]] == [(pid, 19 * 2**30)]


def test_counters_count_in_base_units(fake_nvml: Path, tmp_path: Path) -> None:
    # The fake's PCIe counters have 32 bits and wrap once in this time.
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(lambda: len(watch.samples(0)) > 15)
        first, last = watch.samples(0)[0], watch.samples(0)[-1]
    elapsed_s = last["time"] - first["time"]

    def rate(name: str) -> float:
        grown = float(last["values"][name] - first["values"][name])
        return grown / float(elapsed_s)

    assert rate("energy_joules_total") == pytest.approx(370, rel=0.05)
    assert rate("throttle_seconds_total{reason=sw_power_cap}") == pytest.approx(0.01, rel=0.05)
    assert rate("nvlink_receive_bytes_total") == pytest.approx(1e6 * 1024, rel=0.05)
    assert rate("pcie_receive_bytes_total") == pytest.approx(4e9, rel=0.05)
    assert rate("busy_seconds_total") == pytest.approx(0.5, rel=0.1)


def test_what_a_device_does_not_know_is_absent(fake_nvml: Path, tmp_path: Path) -> None:
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(lambda: len(watch.samples(0)) > 3)
        values = watch.newest(0)["values"]
    # Not available, a field not supported, a call that the library lacks, a threshold not known.
    absent = ("recovery_action", "retired_pages{cause=double_bit}", "temperature_margin_celsius")
    assert not [name for name in absent if name in values]
    assert "temperature_threshold_celsius{threshold=slowdown}" in values
    assert "temperature_threshold_celsius{threshold=gpu_max}" not in values


def test_a_gpu_costs_few_calls(fake_nvml: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    environment = {"LD_LIBRARY_PATH": str(fake_nvml), "FAKE_NVML_CALLS": str(calls)}
    with watched(tmp_path, **environment) as watch:
        wait_until(lambda: len(watch.samples(4)) > 1)
        first, calls_before = len(watch.samples(4)), calls.read_bytes().count(b"4")
        wait_until(lambda: len(watch.samples(4)) >= first + 15)
        rounds = len(watch.samples(4)) - first
        per_round = (calls.read_bytes().count(b"4") - calls_before) / rounds
    assert per_round <= 13.5
    # Each GPU was asked once for what it does not support, though two rounds were due.
    assert calls.read_bytes().count(b"x") == 8


def test_lost_stuck_and_forbidden_gpus_leave_the_others_alone(
    fake_nvml: Path, tmp_path: Path
) -> None:
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(watch.all_up)
        watch.control("3 lost 1\n5 hang_s 1.5\n6 no_permission 1\n")
        wait_until(lambda: watch.newest(5).get("reason") == "stuck")
        wait_until(lambda: watch.newest(3).get("reason") == "lost")
        wait_until(lambda: watch.newest(6).get("reason") == "no_permission")
        time.sleep(1.0)
        rates = [watch.rate(index, 1.0) for index in (0, 1, 2, 4, 7)]
        down = [watch.newest(index) for index in (3, 5, 6)]
        assert rates == pytest.approx([10.0] * 5, abs=2.0)
        assert [sample["up"] for sample in down] == [False] * 3
        assert [sample["values"] for sample in down] == [{}] * 3
        assert watch.health()["up"]
        watch.control("")
        wait_until(watch.all_up)


def test_a_gpu_that_hangs_from_the_start_is_known_by_its_index(
    fake_nvml: Path, tmp_path: Path
) -> None:
    (tmp_path / "control").write_text("5 hang_s 1\n")
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(lambda: any(line.get("device") == "unknown-5" for line in list(watch.lines)))
        wait_until(lambda: watch.newest(4).get("up"))
        watch.control("")
        wait_until(lambda: watch.newest(5).get("up"))
        assert any(line.get("forget") == "unknown-5" for line in list(watch.lines))


def test_a_device_that_answers_nothing_is_a_drivers_fault(fake_nvml: Path, tmp_path: Path) -> None:
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(watch.all_up)
        watch.control("1 unknown 1\n")
        wait_until(lambda: watch.newest(1).get("reason") == "driver")
        assert watch.newest(0)["up"]


def test_without_a_driver_the_source_waits_and_comes_up_by_itself(
    fake_nvml: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    with watched(tmp_path, LD_LIBRARY_PATH=str(folder)) as watch:
        wait_until(lambda: watch.health())
        health = watch.health()
        assert not health["up"]
        assert health["reason"].startswith("libnvidia-ml.so.1 not found: install the NVIDIA driver")
        (folder / "libnvidia-ml.so.1").symlink_to(fake_nvml / "libnvidia-ml.so.1")
        wait_until(watch.all_up)
        wait_until(lambda: watch.health()["up"])


def test_a_library_that_does_not_come_back_is_told(fake_nvml: Path, tmp_path: Path) -> None:
    (tmp_path / "control").write_text("* init_hang_s 1\n")
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(lambda: watch.health().get("reason") == "NVML does not answer")
        wait_until(watch.all_up)


def test_the_library_may_be_named_by_its_file(fake_nvml: Path, tmp_path: Path) -> None:
    other = tmp_path / "driver.so"
    other.write_bytes((fake_nvml / "libnvidia-ml.so.1").read_bytes())
    with watched(tmp_path, WARPWATCH_NVML_LIBRARY=str(other)) as watch:
        wait_until(watch.all_up)


def test_a_driver_that_goes_away_takes_the_devices_down_until_it_is_back(
    fake_nvml: Path, tmp_path: Path
) -> None:
    with watched(tmp_path, LD_LIBRARY_PATH=str(fake_nvml)) as watch:
        wait_until(watch.all_up)
        watch.control("* init 9\n* driver_gone 1\n")
        wait_until(lambda: "Driver Not Loaded" in watch.health().get("reason", ""))
        wait_until(lambda: all(watch.newest(i)["reason"] == "driver" for i in range(8)))
        watch.control("")
        wait_until(watch.all_up)


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (3, Meaning.UNSUPPORTED),
        (13, Meaning.UNSUPPORTED),
        (25, Meaning.UNSUPPORTED),
        (4, Meaning.NO_PERMISSION),
        (6, Meaning.EMPTY),
        (1, Meaning.LIBRARY),
        (9, Meaning.LIBRARY),
        (18, Meaning.LIBRARY),
        (15, Meaning.LOST),
        (28, Meaning.LOST),
        (16, Meaning.RESET_REQUIRED),
        (999, Meaning.UNKNOWN),
        (12345, Meaning.UNKNOWN),
    ],
)
def test_return_codes_mean_what_the_policy_says(code: int, meaning: Meaning) -> None:
    assert meaning_of(code) is meaning
