"""The Prometheus rules before the real promtool: they are valid, and do what their tests say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.conftest import Promtool
from warpwatch_dashboards import rule_files

CASES = Path(__file__).parent / "rules"
FILES = (rule_files.RECORDING, *rule_files.ALERTING)
# Anomalies have a test of their own, from what is exported: test_anomaly_alerts.py.
TESTED = tuple(file for file in FILES if file != "anomalies.yaml")
TESTED_ALERTS = [alert for alert in rule_files.alerts() if "kind" not in alert.labels]


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """The tests of every file of rules."""
    return {file: read(CASES / file) for file in TESTED}


@pytest.fixture(scope="module")
def alert_checks(documents: dict[str, Any]) -> list[dict[str, Any]]:
    cases = [case for document in documents.values() for case in document["tests"]]
    return [check for case in cases for check in case.get("alert_rule_test", ())]


def test_every_file_of_rules_is_known_and_has_tests() -> None:
    assert {path.name for path in rule_files.FOLDER.iterdir()} == set(FILES)
    assert {path.name for path in CASES.iterdir()} == set(TESTED)


def test_the_rules_are_valid(promtool: Promtool) -> None:
    paths = [rule_files.FOLDER / name for name in FILES]
    promtool("check", "rules", "--lint=all", "--lint-fatal", *paths)


def recordings_for(text: str, folder: Path) -> Path:
    """A file of the recording rules without which ``text`` has no series."""
    document = read(rule_files.FOLDER / rule_files.RECORDING)
    rules = {rule["record"]: rule for group in document["groups"] for rule in group["rules"]}
    names: set[str] = set()
    new = names_in(text)
    while new := new - names:
        names |= new
        new = {name for one in new for name in names_in(rules[one]["expr"])}
    for group in document["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule["record"] in names]
    path = folder / rule_files.RECORDING
    path.write_text(yaml.dump(document, Dumper=yaml.CSafeDumper))
    return path


def names_in(text: str) -> set[str]:
    return set(re.findall(r"warpwatch:[\w:]+", text))


def test_the_rules_do_what_their_tests_say(promtool, documents, tmp_path):
    """In each of its minutes every test evaluates all rules that it has."""
    paths = [CASES / file for file in TESTED if file != "fleet.yaml"]
    rules = rule_files.FOLDER / "fleet.yaml"
    used = recordings_for(rules.read_text() + (CASES / "fleet.yaml").read_text(), tmp_path)
    fleet = {**documents["fleet.yaml"], "rule_files": [str(used), str(rules)]}
    (tmp_path / "fleet.yaml").write_text(yaml.dump(fleet, Dumper=yaml.CSafeDumper))
    promtool("test", "rules", *paths, tmp_path / "fleet.yaml")


def test_every_alert_is_seen_firing_with_its_texts(alert_checks: list[dict[str, Any]]) -> None:
    fired = {
        check["alertname"]
        for check in alert_checks
        if check.get("exp_alerts")
        and all(alert["exp_annotations"] for alert in check["exp_alerts"])
    }
    assert fired == {alert.name for alert in TESTED_ALERTS}


def test_every_alert_that_waits_is_seen_waiting(alert_checks: list[dict[str, Any]]) -> None:
    silent = {check["alertname"] for check in alert_checks if not check.get("exp_alerts")}
    assert {alert.name for alert in TESTED_ALERTS if alert.wait != "0s"} <= silent


def test_every_recorded_series_is_compared_with_values(documents: dict[str, Any]) -> None:
    checks = [
        check
        for case in documents[rule_files.RECORDING]["tests"]
        for check in case["promql_expr_test"]
    ]
    compared = {name for one in checks if one.get("exp_samples") for name in names_in(one["expr"])}
    assert compared == {rule.name for rule in rule_files.recordings()}
