"""Monitors, rules and dashboards: as they are committed, and with the labels that they count on."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import chart

DASHBOARDS = chart.ROOT / "dashboards/warpwatch_dashboards"


@functools.cache
def committed_groups() -> list[chart.Object]:
    files = sorted((DASHBOARDS / "rules").glob("*.yaml"))
    return [
        group
        for file in files
        for group in yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["groups"]
    ]


def test_the_rules_arrive_as_they_are_committed(helm3: Path, helm4: Path) -> None:
    """Templates in annotations among them, which are Prometheus' and not Helm's."""
    for helm in (helm3, helm4):
        objects = chart.scenario(helm, "prometheus-operator-values.yaml")
        assert chart.only(objects, "PrometheusRule")["spec"]["groups"] == committed_groups()


def test_rules_can_be_made_a_sites_own(helm4: Path) -> None:
    site = {
        "enabled": True,
        "namespace": "rules",
        "disabledAlerts": ["WarpwatchDown"],
        "additionalRuleLabels": {"team": "platform"},
        "runbookUrl": "https://wiki.example/gpus/",
        "overrides": {"WarpwatchHang": {"severity": "info", "for": "5m"}},
    }
    values = ["--set-json", f"prometheusRule={json.dumps(site)}"]
    found = chart.only(chart.render(helm4, *values), "PrometheusRule")
    assert found["metadata"]["namespace"] == "rules"
    ours = [rule for group in committed_groups() for rule in group["rules"]]
    ours = [rule for rule in ours if rule.get("alert") != "WarpwatchDown"]
    theirs = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
    for own, rule in zip(ours, theirs, strict=True):
        if "record" in own:
            assert rule == own
            continue
        hang = own["alert"] == "WarpwatchHang"
        changed = {"team": "platform"} | ({"severity": "info"} if hang else {})
        assert rule["labels"] == own["labels"] | changed
        assert rule["for"] == ("5m" if hang else own["for"])
        runbook = own["annotations"]["runbook_url"].rpartition("/")[2]
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example/gpus/{runbook}"


def test_an_alert_that_does_not_exist_is_refused(helm4: Path) -> None:
    enabled = "prometheusRule.enabled=true"
    for value in ("overrides.WarpwatchHung.for=5m", "disabledAlerts={WarpwatchHung}"):
        said = chart.refusal(helm4, enabled, f"prometheusRule.{value}")
        assert "there is no alert WarpwatchHung" in said


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_takes(helm4: Path) -> None:
    objects = chart.scenario(helm4, "dashboards-values.yaml")
    found: dict[str, object] = {}
    for each in chart.of_kind(objects, "ConfigMap"):
        if "grafana_dashboard" in each["metadata"]["labels"]:
            assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert each["metadata"]["annotations"] == {"grafana_folder": "Warpwatch"}
            found |= {name: json.loads(text) for name, text in each["data"].items()}
    files = DASHBOARDS.glob("*.json")
    assert found == {f"warpwatch-{file.name}": json.loads(file.read_text()) for file in files}
    assert found


@pytest.mark.parametrize(
    ("scenario", "kind", "endpoints"),
    [
        ("prometheus-operator-values.yaml", "PodMonitor", "podMetricsEndpoints"),
        ("service-monitor-values.yaml", "ServiceMonitor", "endpoints"),
    ],
)
def test_a_monitor_keeps_the_workloads_labels_and_a_rollout_keeps_the_series(
    helm4: Path, scenario: str, kind: str, endpoints: str
) -> None:
    spec = chart.only(chart.scenario(helm4, scenario), kind)["spec"]
    (endpoint,) = spec[endpoints]
    assert endpoint["honorLabels"] is True
    own = {"namespace": "monitoring", "pod": "warpwatch-x1", "container": "warpwatch"}
    pod = {**own, "__meta_kubernetes_pod_node_name": "gpu-17", "instance": "10.0.0.5:9400"}
    told = {"node": "gpu-17", "instance": "gpu-17", "job": "warpwatch"}
    added = {"cluster": "gpu-1"} if kind == "PodMonitor" else {}
    assert relabeled(endpoint["relabelings"], pod) == told | added


def relabeled(relabelings: list[dict[str, Any]], target: dict[str, str]) -> dict[str, str]:
    """The labels of a target's series after these, which Prometheus applies one by one."""
    labels = dict(target)
    for one in relabelings:
        match one.get("action", "replace"):
            case "labeldrop":
                labels = {k: v for k, v in labels.items() if not re.fullmatch(one["regex"], k)}
            case "replace":
                source = ";".join(labels.get(name, "") for name in one.get("sourceLabels", ()))
                labels[one["targetLabel"]] = one.get("replacement", source)
            case action:
                raise AssertionError(f"no monitor uses {action}")
    return {name: value for name, value in labels.items() if not name.startswith("__")}
