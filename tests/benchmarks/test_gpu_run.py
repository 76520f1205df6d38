"""The checks of a real GPU, as far as they can be run without one: on the fake driver."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import capture, counters, nvidia_smi, readers, shim
from benchmarks.gpu.__main__ import BUDGET_S
from benchmarks.gpu.report import CannotCheck, Report, RunSetting
from benchmarks.gpu.runner import CHECKS_S, result_of, run_check
from tests.devices.fakenvml.driver import CannotBuild, header_folder
from tests.loop.other_users import open_folder

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "benchmarks" / "gpu" / "run.sh"

CAPPED = "clocks_event_reasons_counters_sw_power_cap"
XML = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>580.95.05</driver_version>
  <gpu id="00000000:1B:00.0">
    <product_name>NVIDIA H200</product_name>
    <uuid>GPU-1</uuid>
    <fan_speed>N/A</fan_speed>
    <compute_mode>Exclusive_Process</compute_mode>
    <persistence_mode>Enabled</persistence_mode>
    <fb_memory_usage><total>143771 MiB</total><used>4 MiB</used></fb_memory_usage>
    <gpu_power_readings><average_power_draw>75.30 W</average_power_draw></gpu_power_readings>
    <clocks><sm_clock>345 MHz</sm_clock></clocks>
    <clocks_event_reasons_counters><{CAPPED}>91403239 us</{CAPPED}></clocks_event_reasons_counters>
    <pci><tx_util>250 KB/s</tx_util></pci>
  </gpu>
</nvidia_smi_log>
"""

# Of the fake driver's GPU.
FAKE_XML = """<nvidia_smi_log><driver_version>580.105.08</driver_version><gpu>
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <uuid>GPU-00000000-0000-0000-0000-000000000000</uuid>
  <fb_memory_usage><total>81559 MiB</total></fb_memory_usage>
</gpu></nvidia_smi_log>
"""


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """What `run.sh --fake` writes and prints, beside an nvidia-smi that knows the fake's GPU."""
    try:
        header_folder()
    except CannotBuild as reason:
        pytest.skip(f"no fake driver: {reason}")
    tools = tmp_path_factory.mktemp("tools")
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'XML'\n{FAKE_XML}XML\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WARPWATCH_")}
    # An ordinary user loads the fake driver from it.
    with open_folder() as out:
        answer = subprocess.run(
            [str(RUN), "--fake", "--quick", "--out", str(out)],
            env={**kept, "PYTHON": sys.executable, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        yield json.loads((out / "results.json").read_text()), answer.stdout


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(RunSetting(str(tmp_path), fake=True), tmp_path / "report.jsonl")


def written(report: Report) -> dict[str, Any]:
    lines = (Path(report.setting.out) / "report.jsonl").read_text().splitlines()
    return result_of([json.loads(line) for line in lines])


# --- the whole run ---


def test_every_check_runs_and_none_fails(fake_run):
    checks = fake_run[0]["checks"]
    assert list(checks) == list(CHECKS_S)
    assert {name: check["why"] for name, check in checks.items() if check["why"]} == {
        "shim": "the fake driver has no CUDA",
        "capture": "the fake driver has no CUDA",
    }
    assert checks["doctor"]["status"] == "ok"
    assert checks["shim"]["status"] == "skipped"


def test_a_part_that_needs_cuda_is_skipped_with_the_reason(fake_run):
    parts = fake_run[0]["checks"]["readers"]["parts"]
    assert parts["matmul"] == {"skipped": "the fake driver has no CUDA"}


def test_values_are_compared_with_nvidia_smi(fake_run):
    found = fake_run[0]["checks"]["readers"]["parts"]["idle"]["0"]
    by_series = {row["series"]: row["verdict"] for row in found["rows"]}
    assert by_series["memory_total_bytes"] == "agree"
    assert by_series["power_watts"] == "ours_only"


def test_the_daemon_reads_the_gpu_under_the_checks(fake_run):
    (values,) = fake_run[0]["checks"]["readers"]["parts"]["values"]["devices"]
    assert values["power_watts"] > 0
    assert len(values) > 100


def test_each_reader_has_its_answer_and_its_price(fake_run):
    figures = fake_run[0]["checks"]["calls"]["parts"]["readers"]
    by_name = {reader["reader"]: reader for reader in figures["readers"]}
    assert by_name["utilization"]["code"] == "success"
    assert 0 < by_name["utilization"]["p50_us"] <= by_name["utilization"]["max_us"]
    assert by_name["fan_speed"] == {"reader": "fan_speed", "code": "not_supported"}
    assert set(figures["gpm"].values()) == {"success"}


def test_counters_are_followed_while_nothing_runs(fake_run):
    figures = fake_run[0]["checks"]["counters"]["parts"]["idle"]
    assert figures["busy_seconds_total"] == 0.0
    assert figures["energy_joules_total/power_watts"] == pytest.approx(1.0, abs=0.05)


def test_what_identifies_a_gpu_is_blanked(fake_run):
    assert "GPU-00000000-" not in json.dumps(fake_run[0])


def test_the_summary_has_a_line_for_each_check(fake_run):
    _, printed = fake_run
    for name in CHECKS_S:
        assert f"\n{name}: " in printed


def test_the_checks_fit_into_ten_minutes():
    assert BUDGET_S <= 600
    assert max(CHECKS_S.values()) < BUDGET_S


def test_the_wheels_that_are_fetched_are_those_of_the_image():
    assert "/../../requirements-image.txt" in (RUN.parent / "wheels.sh").read_text()
    assert (ROOT / "requirements-image.txt").is_file()


# --- one check and one part ---


def test_a_check_that_hangs_costs_only_itself(tmp_path):
    began = time.monotonic()
    setting = RunSetting(str(tmp_path), fake=True, quick=True)
    result = run_check("footprint", setting, 0.3, tmp_path)
    assert result["status"] == "failed"
    assert result["why"].startswith("not done within 0 s")
    assert time.monotonic() - began < 30


def test_a_check_whose_packages_are_missing_is_skipped_in_one_line(tmp_path):
    result = run_check("no_such_check", RunSetting(str(tmp_path)), 30, tmp_path)
    assert result["status"] == "skipped"
    assert result["why"] == "benchmarks.gpu.no_such_check is not installed"


def test_a_part_that_raises_says_why_in_one_line_and_costs_no_other(report):
    with report.part("broken"):
        raise ValueError("two\nlines")
    with report.part("good") as figures:
        figures["answer"] = 42
    result = written(report)
    assert result["status"] == "failed"
    assert result["why"] == "1 of 1 lines are bad"
    assert result["lines"] == [{"ok": False, "text": "broken: ValueError: two lines"}]
    assert result["parts"]["good"] == {"answer": 42}


def test_a_part_that_has_no_meaning_here_is_no_failure(report):
    with report.part("absent"):
        raise CannotCheck("no such hardware")
    assert (written(report)["status"], written(report)["why"]) == ("skipped", "no such hardware")
    with report.part("present"):
        report.fact("it is there")
    assert written(report)["status"] == "ok"


def test_a_check_that_is_killed_names_the_part_and_keeps_what_was_measured():
    entries: list[dict[str, Any]] = [
        {"begun": "one"},
        {"part": "one", "figures": {"answer": 42}},
        {"begun": "two"},
    ]
    result = result_of(entries, "not done within 60 s")
    assert result["why"] == "not done within 60 s in part two"
    assert result["parts"] == {"one": {"answer": 42}}


# --- against nvidia-smi ---


def verdicts(ours: dict[str, float], before: str = XML, after: str = XML) -> dict[str, str]:
    """By series."""
    first, second = (nvidia_smi.parse(text)["GPU-1"] for text in (before, after))
    device = {"values": ours, "info": {}, "name": "NVIDIA H200"}
    found = readers.compare(device, first, second)
    return {row["series"]: row["verdict"] for row in found["rows"]}


def test_values_agree_within_the_last_digit_that_is_written():
    found = verdicts({"power_watts": 75.304, "memory_total_bytes": 143771.6 * 2**20})
    assert found["power_watts"] == "agree"
    assert found["memory_total_bytes"] == "agree"


def test_a_wrong_unit_differs():
    assert verdicts({"clock_hertz{domain=sm}": 345e3})["clock_hertz{domain=sm}"] == "differs"
    wrong = {"throttle_seconds_total{reason=sw_power_cap}": 91403.239}
    assert verdicts(wrong)["throttle_seconds_total{reason=sw_power_cap}"] == "differs"


def test_a_value_that_moves_lies_between_the_two_readings():
    after = XML.replace("75.30 W", "690.00 W")
    assert verdicts({"power_watts": 400.0}, after=after)["power_watts"] == "between"
    assert verdicts({"power_watts": 900.0}, after=after)["power_watts"] == "differs"


def test_a_counter_may_not_run_ahead_of_the_second_reading():
    series = "throttle_seconds_total{reason=sw_power_cap}"
    assert verdicts({series: 91.403239})[series] == "agree"
    assert verdicts({series: 92.0})[series] == "differs"


def test_absent_on_both_sides_agrees_and_on_one_side_says_which():
    found = verdicts({"mig_mode": 0.0})
    assert found["fan_speed_ratio{fan=0}"] == "agree"
    assert found["mig_mode"] == "ours_only"
    assert found["persistence_mode"] == "theirs_only"


def test_words_are_numbers_of_ours():
    assert verdicts({"compute_mode": 3.0})["compute_mode"] == "agree"
    unknown = XML.replace("Exclusive_Process", "Something_New")
    assert verdicts({"compute_mode": 3.0}, unknown, unknown)["compute_mode"] == "not_comparable"


def test_what_only_one_side_knows_and_what_describes_another_device_is_listed():
    leaves = nvidia_smi.parse(XML)["GPU-1"]
    info = {"driver_version": "570.1"}
    device = {"values": {"busy_seconds_total": 1.0}, "info": info, "name": "NVIDIA H200"}
    found = readers.compare(device, leaves, leaves)
    assert found["only_ours"] == ["busy_seconds_total"]
    assert found["only_theirs"] == ["pci/tx_util"]
    assert found["facts_that_differ"] == ["driver_version"]


# --- counters, step times and traces ---


def test_counters_are_held_against_what_they_must_equal(report):
    figures = {"pcie_receive_bytes_total": 6e9, "copied": 5e9, "tensor_active_ratio": 0.5}
    figures |= counters.related(figures)
    assert figures["pcie_receive_bytes_total/copied"] == 1.2
    counters.judge(report, "host_to_device", figures)
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
    assert shim.true_times(turns, log) == {"duration_s": 1.2}


def test_a_kept_trace_has_the_first_steps_whole(tmp_path):
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1}]
    for step in range(3):
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}"}
        events.append({**mark, "ts": 1000 * step, "dur": 999})
        noise = [f"{step}-{i}-{hash((step, i))}" for i in range(40)]
        events += [{"ph": "X", "name": n, "ts": 1000 * step + 1, "dur": 1} for n in noise]
    source, target = tmp_path / "trace.json.gz", tmp_path / "kept" / "trace.json.gz"
    source.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    kept = capture.keep(source, target, max_bytes=1500)
    assert 1 <= kept["steps"] < 3
    names = {
        event["name"] for event in json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    }
    assert "process_name" in names and "ProfilerStep#0" in names
    assert "ProfilerStep#2" not in names
