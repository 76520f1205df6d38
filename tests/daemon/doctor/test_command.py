"""The command: its text, its JSON, its exit status."""

from __future__ import annotations

import json

import pytest

from warpwatch_daemon.cli import main
from warpwatch_daemon.doctor import text
from warpwatch_daemon.doctor.check import Check
from warpwatch_daemon.doctor.registry import GROUPS

NO_DAEMON = "http://127.0.0.1:9"


def test_findings_are_grouped_aligned_and_wrapped():
    checks = [
        Check("NVML", True, "8 GPUs", group="driver"),
        Check("ECC", False, "GPU 3: off: memory errors corrupt results", "turn it on", "devices"),
        Check("GPM", None, "no samples", group="devices"),
    ]
    assert list(text.lines(checks, width=50)) == [
        "driver",
        "  ok   NVML             8 GPUs",
        "",
        "devices",
        "  BAD  ECC              GPU 3: off: memory errors",
        "                        corrupt results",
        "                        → turn it on",
        "  note GPM              no samples",
        "",
        "to fix: ECC",
        "1 problem, 1 note",
    ]
    long = Check("x" * 16, False, "word " * 100, "advice " * 100, "devices")
    assert max(len(line) for line in text.lines([long], width=80)) <= 80


def test_json_has_every_finding_with_group_and_advice_and_the_text_a_summary(driver, capsys):
    driver("h100", gpus=2).set(1, lost=1)
    assert main(["doctor", "--json", "--url", NO_DAEMON]) == 1
    found = json.loads(capsys.readouterr().out)
    assert all(set(check) == {"name", "ok", "detail", "advice", "group"} for check in found)
    assert {check["group"] for check in found} <= set(GROUPS)
    by_name = {check["name"]: check for check in found}
    assert by_name.keys() >= {"platform", "NVML", "rendezvous", "inbox", "capture store", "daemon"}
    assert by_name["platform"]["ok"] is True
    assert by_name["daemon"]["ok"] is None
    assert by_name["GPU 0"]["ok"] is True
    assert by_name["GPU 1"]["ok"] is False
    assert "power-cycle" in by_name["GPU 1"]["advice"]
    assert main(["doctor", "--url", NO_DAEMON]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warpwatch ")
    assert [line for line in lines if line in GROUPS][:3] == ["agent", "driver", "devices"]
    assert lines[-1].split()[1].rstrip(",") in ("problem", "problems")


def test_without_nvml_wanted_no_driver_is_asked(monkeypatch, capsys):
    monkeypatch.setenv("WARPWATCH_SOURCES__NVML__ENABLED", "false")
    monkeypatch.setattr("warpwatch_daemon.doctor.survey.ask_driver", pytest.fail)
    code = main(["doctor", "--json", "--url", NO_DAEMON])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["NVML"]["ok"] is None
    assert code == (1 if any(check["ok"] is False for check in checks.values()) else 0)
