"""Monitors, rules and dashboards: as they are committed, and with the labels that they count on."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import chart

DASHBOARDS = chart.ROOT / "dashboards/warpwatch_dashboards"


def committed_groups() -> list[chart.Object]:
    files = sorted((DASHBOARDS / "rules").glob("*.yaml"))
    return [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]


@pytest.fixture
def rules(helm3: Path, helm4: Path) -> chart.Object:
    """The rendered PrometheusRule's spec, of both Helms."""
    one, other = (
        chart.only(chart.scenario(helm, "prometheus-operator-values.yaml"), "PrometheusRule")
        for helm in (helm3, helm4)
    )
    assert one == other
    spec: chart.Object = one["spec"]
    return spec


def test_the_rules_arrive_as_they_are_committed(rules: chart.Object) -> None:
    """Templates in annotations among them, which are Prometheus' and not Helm's."""
    assert rules["groups"] == committed_groups()
    texts = [
        text
        for group in rules["groups"]
        for rule in group["rules"]
        for text in rule.get("annotations", {}).values()
    ]
    assert any("$labels." in text and "{{" in text for text in texts)


def test_promtool_accepts_the_rendered_rules(rules: chart.Object, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules))
    command = [promtool, "check", "rules", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout


def test_an_alert_can_be_left_out(helm4: Path) -> None:
    values = ["--set", "prometheusRule.enabled=true"]
    values += ["--set", "prometheusRule.disabledAlerts={WarpwatchDown}"]
    spec = chart.only(chart.render(helm4, *values), "PrometheusRule")["spec"]
    left = [rule.get("alert") for group in spec["groups"] for rule in group["rules"]]
    everything = [rule.get("alert") for group in committed_groups() for rule in group["rules"]]
    assert "WarpwatchDown" in everything
    assert left == [alert for alert in everything if alert != "WarpwatchDown"]


def test_rules_can_be_made_a_sites_own(helm4: Path) -> None:
    site = {
        "enabled": True,
        "namespace": "rules",
        "additionalRuleLabels": {"team": "platform"},
        "runbookUrl": "https://wiki.example/gpus/",
        "overrides": {"WarpwatchHang": {"severity": "info", "for": "5m"}},
    }
    values = ["--set-json", f"prometheusRule={json.dumps(site)}"]
    found = chart.only(chart.render(helm4, *values), "PrometheusRule")
    assert found["metadata"]["namespace"] == "rules"
    ours = [rule for group in committed_groups() for rule in group["rules"]]
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
    helm4: Path, scenario: str, kind: str, endpoints: str, tmp_path: Path
) -> None:
    """Prometheus itself says what the relabelings make of a pod and of the one that replaces it."""
    spec = chart.only(chart.scenario(helm4, scenario), kind)["spec"]
    (endpoint,) = spec[endpoints]
    assert endpoint["honorLabels"] is True
    own = {"namespace": "monitoring", "pod": "warpwatch-x1", "container": "warpwatch"}
    pods = [
        {"targets": [address], "labels": {"__meta_kubernetes_pod_node_name": "gpu-17", **own}}
        for address in ("10.0.0.5:9400", "10.0.0.9:9400")
    ]
    found = relabeled(endpoint["relabelings"], pods, tmp_path)
    told = {"node": "gpu-17", "instance": "gpu-17", "job": "warpwatch"}
    added = {"cluster": "gpu-1"} if kind == "PodMonitor" else {}
    assert [told | added] * 2 == found


def relabeled(
    relabelings: list[dict[str, Any]], targets: list[dict[str, Any]], folder: Path
) -> list[dict[str, str]]:
    """The labels of these targets' series."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    configs = [{names.get(key, key): value for key, value in one.items()} for one in relabelings]
    scraped = {"job_name": "pods", "static_configs": targets, "relabel_configs": configs}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [scraped]}))
    command = [promtool, "check", "service-discovery", "--timeout=1s", str(file), "pods"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [
        {name: value for name, value in one["labels"].items() if not name.startswith("__")}
        for one in json.loads(checked.stdout)
    ]


def test_a_monitor_checks_the_certificate(helm4: Path) -> None:
    objects = chart.scenario(helm4, "service-monitor-values.yaml")
    (endpoint,) = chart.only(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "warpwatch-peers.monitoring.svc",
        "ca": {"secret": {"name": "warpwatch-tls", "key": "ca.crt"}},
    }


def test_a_sidecars_own_pod_is_the_workload(helm4: Path) -> None:
    spec = chart.only(chart.scenario(helm4, "sidecar-values.yaml"), "PodMonitor")["spec"]
    assert spec["namespaceSelector"] == {"any": True}
    assert spec["selector"] == {"matchLabels": {"warpwatch/sidecar": "true"}}
    (endpoint,) = spec["podMetricsEndpoints"]
    assert [each["action"] for each in endpoint["relabelings"]] == ["replace", "replace"]
    # Else a tenant's series could say that they are another's.
    assert "honorLabels" not in endpoint
    assert endpoint["port"] == "warpwatch"
