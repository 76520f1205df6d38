"""Every alert tells people what to do, and speaks only of what Warpwatch exports."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest

from tests.dashboards.promql_labels import labels_of, metric_labels
from warpwatch_dashboards import rule_files
from warpwatch_telemetry.anomalies import KINDS, scope_of
from warpwatch_telemetry.captures import CAPTURE_KINDS, OUTCOMES, UPLOAD_OUTCOMES

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUNBOOKS = DOCS / "runbooks"
EXAMPLES = DOCS.parent / "examples/prometheus"
RUNBOOK_URL = "https://github.com/warpwatch/warpwatch/blob/main/docs/runbooks/"
ALERTS = {alert.name: alert for alert in rule_files.alerts()}
RECORDED = {rule.name: rule.expression for rule in rule_files.recordings()}
EXPRESSIONS = {**RECORDED, **{name: alert.expression for name, alert in ALERTS.items()}}


def selectors(expression: str) -> Iterator[tuple[str, str]]:
    """Each series name with its matchers."""
    names = r"\b(up|warpwatch[_:][\w:]*)(?:\{([^}]*)\})?"
    for found in re.finditer(names, expression):
        yield found[1], found[2] or ""


def matchers(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"", text)


def test_one_name_has_one_severity_and_critical_is_only_hardware_and_a_blind_fleet() -> None:
    """Stock inhibition mutes the warnings of a critical alert's name and namespace."""
    for alert in ALERTS.values():
        assert alert.severity in {"warning", "critical"}
        wakes = alert.labels["scope"] == "hardware" or alert.name == "WarpwatchFleetBlind"
        assert alert.severity == "warning" or wakes
        if critical := ALERTS.get(f"{alert.name}Critical"):
            assert (alert.severity, critical.severity) == ("warning", "critical")
        # One that renders to nothing would stay on the series ALERTS as it is written.
        assert "{{" not in "".join(alert.labels.values())
        kind = alert.labels.get("kind")
        assert alert.labels["scope"] in ({scope_of(kind)} if kind else {"job", "agent"})


def test_an_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on() -> None:
    for alert in ALERTS.values():
        assert set(alert.annotations) == {"summary", "description", "runbook_url"}
        named = alert.name.removesuffix("Critical")
        assert alert.annotations["runbook_url"] == f"{RUNBOOK_URL}{named}.md"
        assert alert.labels.get("capture", "torch") in CAPTURE_KINDS
        assert "\n" not in "".join(alert.annotations.values())


def test_a_runbook_says_what_it_means_how_to_check_and_what_to_do() -> None:
    for path in RUNBOOKS.iterdir():
        name, text = path.stem, path.read_text()
        headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
        assert headings == [f"# {name}", "## What it means", "## How to check", "## What to do"]
        assert all(len(part.split()) >= 15 for part in text.split("\n## ")[1:]), name


def test_there_is_no_runbook_without_an_alert() -> None:
    assert {path.name for path in RUNBOOKS.iterdir()} == {a.runbook for a in ALERTS.values()}


def test_runbooks_name_only_series_that_exist() -> None:
    for path in RUNBOOKS.iterdir():
        for metric in re.findall(r"\bwarpwatch[_:][a-z][\w:]*", path.read_text()):
            metric_labels(metric)


def test_expressions_take_only_series_and_labels_that_exist() -> None:
    for name, expression in EXPRESSIONS.items():
        assert labels_of(promql.parse(expression)) is not None, name


def test_expressions_take_only_values_of_closed_sets() -> None:
    outcomes = {*OUTCOMES, *UPLOAD_OUTCOMES}
    closed = {"kind": set(KINDS) | set(CAPTURE_KINDS), "outcome": outcomes}
    for name, expression in EXPRESSIONS.items():
        for _, text in selectors(expression):
            for label, _, value in matchers(text):
                assert set(value.split("|")) <= closed.get(label, {*value.split("|")}), name


def test_texts_name_only_labels_that_the_alert_can_have() -> None:
    for alert in ALERTS.values():
        texts = " ".join((*alert.annotations.values(), *alert.labels.values()))
        named = set(re.findall(r"\$labels\.(\w+)", texts))
        assert named <= labels_of(promql.parse(alert.expression)), alert.name


def test_the_table_of_all_alerts_is_up_to_date() -> None:
    text = (DOCS / "alerts.md").read_text()
    assert text == rule_files.into_document(text)
    with pytest.raises(ValueError, match="is not there"):
        rule_files.into_document("")


def test_the_overview_defines_every_recorded_series() -> None:
    text = (DOCS / "alerts.md").read_text()
    for name in RECORDED:
        _, level, rest = name.split(":", 2)
        # The fleet's are listed without their beginning.
        short = rest if level == "fleet" else rest.split(":")[1]
        assert name in text or f"…:{short}`" in text or f"`{short}" in text, name


def test_the_examples_of_prometheus_and_alertmanager_are_valid() -> None:
    for tool, check in (("promtool", "check config --syntax-only"), ("amtool", "check-config")):
        binary = shutil.which(tool)
        if binary is None:
            pytest.skip(f"{tool} is not installed")
        name = "prometheus.yml" if tool == "promtool" else "alertmanager.yml"
        command = [binary, *check.split(), str(EXAMPLES / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    texts = (EXAMPLES / "alertmanager.yml").read_text() + (DOCS / "alerts.md").read_text()
    assert set(re.findall(r"Warpwatch[A-Z]\w+", texts)) <= ALERTS.keys()
