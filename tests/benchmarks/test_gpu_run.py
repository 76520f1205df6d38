"""The checks of a real GPU, as far as they run on the fake driver."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import loop, values
from benchmarks.gpu.runner import CHECKS, CannotCheck, Report, RunSetting, result_of, run_check
from tests.cases import cases
from tests.devices.fakenvml.driver import CannotBuild, header_folder
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "benchmarks" / "gpu" / "run.sh"

XML = Path(__file__).with_name("nvidia_smi.xml").read_text()
FAKE_XML = Path(__file__).with_name("nvidia_smi_of_fake.xml")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(RunSetting(str(tmp_path), fake=True), tmp_path / "report.jsonl")


def written(report: Report) -> dict[str, Any]:
    lines = (Path(report.setting.out) / "report.jsonl").read_text().splitlines()
    return result_of([json.loads(line) for line in lines])


# --- the run ---


@pytest.mark.deploy
def test_every_check_runs_and_none_fails(tmp_path):
    try:
        header_folder()
    except CannotBuild as reason:
        pytest.skip(f"no fake driver: {reason}")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat {FAKE_XML}\n")
    smi.chmod(0o755)
    environment = {"PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(RUN), "--fake", "--quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "out" / "results.json").read_text()
    # The results do not identify the GPU.
    assert "GPU-00000000-" not in text
    checks = json.loads(text)["checks"]
    assert list(checks) == list(CHECKS)
    assert all(f"\n{name}: " in done.stdout for name in CHECKS)
    assert {name: check["why"] for name, check in checks.items() if check["why"]} == {
        "shim": "the fake driver has no CUDA", "capture": "the fake driver has no CUDA",
    }  # fmt: skip
    assert [checks[name]["status"] for name in ("calls", "shim")] == ["ok", "skipped"]
    found = checks["readers"]["parts"]["idle"]["0"]["rows"]
    by_series = {row["series"]: row for row in found}
    assert by_series["memory_total_bytes"]["verdict"] == "agree"
    power = by_series["power_watts"]
    assert (power["verdict"], power["ours"] > 0) == ("ours_only", True)
    figures = checks["calls"]["parts"]["readers"]
    by_name = {reader["reader"]: reader for reader in figures["readers"]}
    assert by_name["utilization"]["code"] == "success"
    assert 0 < by_name["utilization"]["p50_us"] <= by_name["utilization"]["max_us"]
    assert by_name["fan_speed"] == {"reader": "fan_speed", "code": "not_supported"}
    assert set(figures["gpm"].values()) == {"success"}
    figures = checks["counters"]["parts"]["idle"]
    assert figures["busy_seconds_total"] == 0.0
    assert figures["energy_joules_total/power_watts"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("check", "timeout_s", "status", "why"),
    [
        ("footprint", 0.1, "failed", "not done within 0 s"),
        ("no_such", 300.0, "skipped", "benchmarks.gpu.no_such is not installed"),
    ],
)
def test_a_check_that_hangs_or_is_not_installed_ends_only_itself(
    tmp_path, check, timeout_s, status, why
):
    result = run_check(check, RunSetting(str(tmp_path), fake=True), timeout_s, tmp_path)
    assert (result["status"], result["why"][: len(why)]) == (status, why)


def test_a_part_that_raises_ends_only_itself_and_a_part_that_cannot_run_is_skipped(report):
    with report.part("absent"):
        raise CannotCheck("no such hardware")
    assert (written(report)["status"], written(report)["why"]) == ("skipped", "no such hardware")
    with report.part("good") as figures:
        figures["answer"] = 42
    assert written(report)["status"] == "ok"
    with report.part("broken"):
        raise ValueError("two\nlines")
    result = written(report)
    assert (result["status"], result["why"]) == ("failed", "1 of 1 lines are bad")
    assert result["lines"] == [{"ok": False, "text": "broken: ValueError: two lines"}]
    assert result["parts"]["good"] == {"answer": 42}


def test_a_check_that_is_killed_names_the_part_and_keeps_what_was_measured():
    measured = {"part": "one", "figures": {"answer": 42}}
    result = result_of([{"begun": "one"}, measured, {"begun": "two"}], "not done within 60 s")
    assert result["why"] == "not done within 60 s in part two"
    assert result["parts"] == {"one": {"answer": 42}}


# --- against nvidia-smi ---


READINGS = {
    "plain": XML, "hotter": XML.replace("75.30 W", "690.00 W"),
    "new word": XML.replace("Exclusive_Process", "Something_New"),
}  # fmt: skip


@pytest.mark.parametrize(("series", "ours", "readings", "verdict"), cases(__file__)["compared"])
def test_a_value_is_compared_with_two_readings_of_nvidia_smi(series, ours, readings, verdict):
    first, second = (values.parse_smi(READINGS[one])["GPU-1"] for one in readings)
    device = {"values": {} if ours is None else {series: ours}, "info": {}, "name": "NVIDIA H200"}
    rows = values.compare(device, first, second)["rows"]
    assert {row["series"]: row["verdict"] for row in rows}[series] == verdict


def test_values_of_one_side_and_facts_that_differ_are_listed():
    leaves = values.parse_smi(XML)["GPU-1"]
    info = {"driver_version": "570.1"}
    device = {"values": {"busy_seconds_total": 1.0}, "info": info, "name": "NVIDIA H200"}
    found = values.compare(device, leaves, leaves)
    assert found["only_ours"] == ["busy_seconds_total"]
    assert found["only_theirs"] == ["pci/tx_util"]
    assert found["facts_that_differ"] == ["driver_version"]


# --- counters and step times ---


def test_counters_are_compared_with_the_values_that_they_must_equal(report):
    figures = {"pcie_receive_bytes_total": 6e9, "copied": 5e9, "tensor_active_ratio": 0.5}
    figures |= values.related(figures)
    assert figures["pcie_receive_bytes_total/copied"] == 1.2
    values.judge(report, "host_to_device", figures)
    assert [line["ok"] for line in written(report)["lines"]] == [True, False]


def test_step_times_are_compared_within_each_turn(tmp_path):
    log = tmp_path / "log.jsonl"
    durations_s = [9.0, 0.011, 0.013, 9.0, 0.012, 0.012]
    log.write_text(
        "".join(
            f"{json.dumps({'type': 'step', 'step': step, 'duration_s': duration})}\n"
            for step, duration in enumerate(durations_s)
        )
    )
    turns = [{"first_step": first, "steps": 3, "step_us": 10_000.0} for first in (0, 3)]
    assert loop.true_times(turns, log) == {"duration_s": 1.2}
