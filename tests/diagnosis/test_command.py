"""``python -m warpwatch.diagnosis``: what it prints, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.diagnosis.traces import LOADER, cpu_rank
from warpwatch.diagnosis.__main__ import main


def test_a_healthy_trace_exits_0_and_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(0).write(tmp_path / "rank0.json")
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "healthy: operators run for 100 % of the step and nothing stands out"
    assert lines[2] == "rank0.json, rank 0, CPU only, 4 steps, 0.040 s"


def test_a_problem_exits_1_and_json_has_the_documented_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(3, loading_us=6000).write(tmp_path / "a.json")
    assert main([str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["schema", "traces", "findings", "verdict", "summary"]
    assert (found["schema"], found["verdict"]) == (1, "data_loading")
    finding = found["findings"][0]
    assert list(finding) == [
        "kind", "rank", "share", "recoverable_s", "confidence", "evidence", "advice",
    ]  # fmt: skip
    assert (finding["rank"], finding["share"], finding["recoverable_s"]) == (3, 0.6, 0.024)


def test_unusable_input_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "absent.json: No such file" in captured.err


def test_a_report_that_cannot_be_written_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(0).write(tmp_path / "a.json")
    assert main([str(path), "--html", str(tmp_path / "no" / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_names_from_the_trace_cannot_act_in_the_report_or_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = cpu_rank(0, loading_us=6000)
    for event in trace.events:
        if event["name"] == LOADER:
            event["name"] = f"{LOADER}<script>alert(1)</script>\x1b[2J"
    report = tmp_path / "report.html"
    assert main([str(trace.write(tmp_path / "a.json")), "--html", str(report)]) == 1
    assert "\x1b" not in capsys.readouterr().out
    page = report.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.index("data_loading</h1>") < page.index("Where the time went")


def test_the_module_runs_as_a_process_and_its_help_has_an_example() -> None:
    command = [sys.executable, "-m", "warpwatch.diagnosis", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "example: python -m warpwatch.diagnosis rank0.pt.trace.json.gz" in done.stdout
