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

from benchmarks.gpu import comparison, nvidia_smi, traces
from benchmarks.gpu.check import CannotCheck, Finding, Part, Setting
from benchmarks.gpu.child import run_part
from benchmarks.gpu.registry import BUDGET_S, TIMEOUTS_S
from benchmarks.gpu.runner import run_one
from benchmarks.gpu.sampling import Followed
from tests.devices.fakenvml.driver import CannotBuild, header_folder

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "benchmarks" / "gpu" / "run.sh"

XML = """<?xml version="1.0" ?>
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
    <clocks_event_reasons_counters>{counter}</clocks_event_reasons_counters>
    <pci><tx_util>250 KB/s</tx_util></pci>
  </gpu>
</nvidia_smi_log>
"""
CAPPED = "clocks_event_reasons_counters_sw_power_cap"
XML = XML.replace("{counter}", f"<{CAPPED}>91403239 us</{CAPPED}>")


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """What `run.sh --fake` writes and prints."""
    try:
        header_folder()
    except CannotBuild as reason:
        pytest.skip(f"no fake driver: {reason}")
    out = tmp_path_factory.mktemp("gpu")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WARPWATCH_")}
    answer = subprocess.run(
        [str(RUN), "--fake", "--quick", "--out", str(out)],
        env={**kept, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode in (0, 1), answer.stderr
    yield json.loads((out / "results.json").read_text()), answer.stdout


def rows(ours: dict[str, float], before: str = XML, after: str = XML) -> dict[str, str]:
    """Verdicts by series."""
    first, second = (nvidia_smi.parse(text)["GPU-1"] for text in (before, after))
    found = comparison.compare(ours, first, second)
    return {row["series"]: row["verdict"] for row in found["rows"]}


# --- the whole run ---


def test_every_check_has_a_result_and_none_hangs(fake_run):
    results, _ = fake_run
    assert list(results["checks"]) == list(TIMEOUTS_S)
    statuses = {name: check["status"] for name, check in results["checks"].items()}
    assert not {"timed_out"} & set(statuses.values()), statuses
    assert statuses["doctor"] == "ok"


def test_what_needs_cuda_or_nvidia_smi_is_skipped_with_the_reason(fake_run):
    checks = fake_run[0]["checks"]
    for name in ("shim", "capture"):
        assert checks[name]["status"] == "skipped"
        assert checks[name]["why"] == "the fake driver has no CUDA"
    assert "skipped" in checks["readers"]["parts"]["busy"]
    assert checks["gpm"]["parts"]["matmul"] == {"skipped": "the fake driver has no CUDA"}


def test_no_part_fails_on_the_fake_driver(fake_run):
    errors = {
        f"{name}.{part}": result["error"]
        for name, check in fake_run[0]["checks"].items()
        for part, result in check["parts"].items()
        if "error" in result
    }
    # Without root there are no rights to give up, which is a reason and no error.
    assert errors == {}


def test_the_daemon_reads_the_gpu_under_the_checks(fake_run):
    (device,) = fake_run[0]["checks"]["readers"]["parts"]["values"]["measured"]["devices"]
    assert device["values"]["power_watts"] > 0
    assert len(device["values"]) > 100


def test_each_call_and_each_field_has_its_answer_and_price(fake_run):
    parts = fake_run[0]["checks"]["calls"]["parts"]
    calls = parts["calls"]["measured"]
    assert calls["UtilizationRates"]["code"] == "success"
    assert calls["UtilizationRates"]["n"] == 5
    assert calls["PcieThroughput/tx"]["p50_us"] >= 20_000
    assert calls["PcieThroughput/tx"]["n"] == 2
    answers = {answer["field"]: answer for answer in parts["fields"]["measured"]["answers"]}
    assert answers[83]["type"] == "uint64"
    assert answers[17]["code"] in ("success", "not_supported")
    assert parts["samples"]["measured"]["total_power"]["period_ms"] > 0


def test_what_identifies_a_gpu_is_blanked(fake_run):
    text = json.dumps(fake_run[0])
    assert "GPU-0," in text
    assert "GPU-00000000-" not in text


def test_the_summary_has_a_line_for_each_check(fake_run):
    _, printed = fake_run
    for name in TIMEOUTS_S:
        assert f"\n{name}: " in printed


def test_the_checks_fit_into_ten_minutes():
    assert BUDGET_S <= 600
    assert max(TIMEOUTS_S.values()) < BUDGET_S


# --- one check and one part ---


def test_a_check_that_hangs_costs_only_itself(tmp_path):
    began = time.monotonic()
    result = run_one("footprint", 0.3, Setting(tmp_path, fake=True, quick=True), tmp_path)
    assert result["status"] == "timed_out"
    assert result["why"].startswith("not done within 0 s")
    assert time.monotonic() - began < 30


def test_a_check_that_does_not_exist_fails_in_one_line(tmp_path):
    result = run_one("no_such_check", 30, Setting(tmp_path, fake=True), tmp_path)
    assert result["status"] == "skipped"
    assert result["why"] == "benchmarks.gpu.no_such_check is not installed"


def test_a_part_that_raises_says_why_in_one_line():
    def measure() -> None:
        raise ValueError("two\nlines")

    result, findings = run_part(Part("broken", measure))
    assert result["error"] == "ValueError: two lines"
    assert findings == [{"ok": False, "text": "broken: ValueError: two lines"}]


def test_a_part_that_has_no_meaning_here_is_no_failure():
    def measure() -> None:
        raise CannotCheck("no such hardware")

    assert run_part(Part("absent", measure)) == ({"skipped": "no such hardware"}, [])


def test_a_part_keeps_what_was_measured_and_what_it_means():
    part = Part("good", lambda: 42, lambda measured: [Finding(True, f"it is {measured}")])
    result, findings = run_part(part)
    assert result["measured"] == 42
    assert findings == [{"ok": True, "text": "it is 42"}]


# --- against nvidia-smi ---


def test_values_agree_within_the_last_digit_that_is_written():
    found = rows({"power_watts": 75.304, "memory_total_bytes": 143771.6 * 2**20})
    assert found["power_watts"] == "agree"
    assert found["memory_total_bytes"] == "agree"


def test_a_wrong_unit_differs():
    assert rows({"clock_hertz{domain=sm}": 345e3})["clock_hertz{domain=sm}"] == "differs"
    wrong = {"throttle_seconds_total{reason=sw_power_cap}": 91403.239}
    assert rows(wrong)["throttle_seconds_total{reason=sw_power_cap}"] == "differs"


def test_a_value_that_moves_lies_between_the_two_readings():
    after = XML.replace("75.30 W", "690.00 W")
    assert rows({"power_watts": 400.0}, after=after)["power_watts"] == "between"
    assert rows({"power_watts": 900.0}, after=after)["power_watts"] == "differs"


def test_a_counter_may_not_run_ahead_of_the_second_reading():
    series = "throttle_seconds_total{reason=sw_power_cap}"
    assert rows({series: 91.403239})[series] == "agree"
    assert rows({series: 92.0})[series] == "differs"


def test_absent_on_both_sides_agrees_and_on_one_side_says_which():
    found = rows({"mig_mode": 0.0})
    assert found["fan_speed_ratio{fan=0}"] == "agree"
    assert found["mig_mode"] == "ours_only"
    assert found["persistence_mode"] == "theirs_only"


def test_words_are_numbers_of_ours():
    assert rows({"compute_mode": 3.0})["compute_mode"] == "agree"
    unknown = XML.replace("Exclusive_Process", "Something_New")
    assert rows({"compute_mode": 3.0}, unknown, unknown)["compute_mode"] == "not_comparable"


def test_what_only_one_side_knows_is_listed():
    leaves = nvidia_smi.parse(XML)["GPU-1"]
    found = comparison.compare({"busy_seconds_total": 1.0}, leaves, leaves)
    assert found["not_in_nvidia_smi"] == ["busy_seconds_total"]
    assert found["only_in_nvidia_smi"] == ["pci/tx_util"]


# --- growth and traces ---


def test_growth_takes_each_fall_as_a_wrap_of_32_bits():
    followed = Followed({197: [(0.0, 4e9), (0.5, 100.0), (1.0, 300.0)]})
    growth = followed.growth(197)
    assert growth["falls"] == 1
    assert growth["growth_if_32_bits"] == 300 - 4e9 + 2**32
    assert growth["above_32_bits"] is False


def test_an_integral_of_power_is_energy():
    assert Followed({186: [(0.0, 100.0), (1.0, 200.0), (3.0, 200.0)]}).integral(186) == 550.0
    assert Followed().integral(186) is None


def test_a_kept_trace_has_the_first_steps_whole(tmp_path):
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1}]
    for step in range(3):
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}"}
        events.append({**mark, "ts": 1000 * step, "dur": 999})
        noise = [f"{step}-{i}-{hash((step, i))}" for i in range(40)]
        events += [{"ph": "X", "name": n, "ts": 1000 * step + 1, "dur": 1} for n in noise]
    source, target = tmp_path / "trace.json.gz", tmp_path / "kept" / "trace.json.gz"
    source.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    kept = traces.keep(source, target, max_bytes=1500)
    assert 1 <= kept["steps"] < 3
    names = {
        event["name"] for event in json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    }
    assert "process_name" in names and "ProfilerStep#0" in names
    assert "ProfilerStep#2" not in names
