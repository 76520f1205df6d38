"""The Prometheus rules before the real promtool: they are valid, and do what their tests say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.conftest import Promtool
from warpwatch_dashboards import rule_files

CASES = Path(__file__).parent / "rules"
FILES = (rule_files.RECORDING, *rule_files.ALERTING)


def cases(file: str) -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load((CASES / file).read_text())["tests"]
    return tests


def test_every_file_of_rules_is_known_and_has_tests() -> None:
    assert {path.name for path in rule_files.FOLDER.iterdir()} == set(FILES)
    assert {path.name for path in CASES.iterdir()} == set(FILES)


def test_the_rules_are_valid(promtool: Promtool) -> None:
    paths = [str(rule_files.FOLDER / name) for name in FILES]
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", *paths)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_the_rules_do_what_their_tests_say(promtool: Promtool, file: str) -> None:
    done = promtool("test", "rules", str(CASES / file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_rule_fails_its_tests(promtool: Promtool, tmp_path: Path) -> None:
    rules = (rule_files.FOLDER / "fleet.yaml").read_text()
    (tmp_path / "fleet.yaml").write_text(rules.replace("> 1.15", "> 1.55"))
    tests = yaml.safe_load((CASES / "fleet.yaml").read_text())
    tests["rule_files"] = [str(rule_files.FOLDER / rule_files.RECORDING), "fleet.yaml"]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode == 1
    assert "WarpwatchStragglerAcrossNodes" in done.stdout + done.stderr


def test_every_alert_is_seen_firing_with_its_texts() -> None:
    fired = {
        check["alertname"]
        for file in rule_files.ALERTING
        for case in cases(file)
        for check in case.get("alert_rule_test", ())
        if all(alert["exp_annotations"] for alert in check.get("exp_alerts", ()))
        and check.get("exp_alerts")
    }
    assert fired == {alert.name for alert in rule_files.alerts()}


def test_every_alert_that_waits_is_seen_waiting() -> None:
    silent = {
        check["alertname"]
        for file in rule_files.ALERTING
        for case in cases(file)
        for check in case.get("alert_rule_test", ())
        if not check.get("exp_alerts")
    }
    assert {alert.name for alert in rule_files.alerts() if alert.wait != "0s"} <= silent


def test_every_recorded_series_is_compared_with_values() -> None:
    compared = {
        name
        for case in cases(rule_files.RECORDING)
        for check in case["promql_expr_test"]
        if check.get("exp_samples")
        for name in re.findall(r"warpwatch:[\w:]+", check["expr"])
    }
    assert compared == {rule.name for rule in rule_files.recordings()}


def test_recorded_series_are_named_by_level_metric_and_operation() -> None:
    for rule in rule_files.recordings():
        prefix, level, metric, operation = rule.name.split(":")
        assert prefix == "warpwatch" and metric and operation
        assert level in {"rank", "job", "device", "node", "fleet"}
