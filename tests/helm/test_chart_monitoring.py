"""Monitors, rules and dashboards: as they are committed, and with the labels that they count on."""

import functools
import json
import re
from collections.abc import Iterator, Mapping
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
        "enabled": True, "namespace": "rules", "disabledAlerts": ["WarpwatchDown"],
        "additionalRuleLabels": {"team": "platform"}, "runbookUrl": "https://wiki.example/gpus/",
        "overrides": {"WarpwatchHang": {"severity": "info", "for": "5m"}},
    }  # fmt: skip
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


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_takes(helm4: Path) -> None:
    objects = chart.scenario(helm4, "dashboards-values.yaml")
    found: dict[str, object] = {}
    for each in chart.of_kind(objects, "ConfigMap"):
        if "grafana_dashboard" in each["metadata"]["labels"]:
            found |= {name: json.loads(text) for name, text in each["data"].items()}
    files = DASHBOARDS.glob("*.json")
    assert found == {f"warpwatch-{file.name}": json.loads(file.read_text()) for file in files}
    assert found


AGENT = {"node": "gpu-17", "instance": "gpu-17", "job": "warpwatch"}
FLEET = {"instance": "warpwatch-x1", "job": "warpwatch-fleet"}


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_agents_and_fleet_are_scraped_once_each_as_what_they_are(helm4: Path, kind: str) -> None:
    """On one node; the workloads' labels are kept, and a rollout keeps the series."""
    file = chart.CHART / "ci/fleet-values.yaml"
    chosen = chart.sets("serviceMonitor.enabled=false", f"{kind[0].lower()}{kind[1:]}.enabled=true")
    objects = chart.render(helm4, "--values", str(file), *chosen)
    own = {"namespace": "monitoring", "pod": "warpwatch-x1", "container": "warpwatch"}
    target = {**own, "instance": "10.0.0.5:9400", "__meta_kubernetes_pod_node_name": "gpu-17"}
    target["__meta_kubernetes_pod_name"] = "warpwatch-x1"
    for workload, labels in (("DaemonSet", AGENT), ("StatefulSet", FLEET)):
        (endpoint,) = scrapes(objects, kind, chart.only(objects, workload))
        assert endpoint["honorLabels"] is True
        assert relabeled(endpoint["relabelings"], target) == labels


def scrapes(
    objects: tuple[chart.Object, ...], kind: str, workload: chart.Object
) -> Iterator[chart.Object]:
    """Yield the endpoints by which Prometheus finds the workload's pods."""
    pod = workload["spec"]["template"]["metadata"]["labels"]
    every = chart.of_kind(objects, "Service")
    services = [service for service in every if selects(service["spec"]["selector"], pod)]
    for monitor in chart.of_kind(objects, kind):
        spec = monitor["spec"]
        wanted = spec["selector"]["matchLabels"]
        if kind == "PodMonitor" and selects(wanted, pod):
            yield from spec["podMetricsEndpoints"]
        elif kind == "ServiceMonitor":
            for service in services:
                ports = [port["name"] for port in service["spec"]["ports"]]
                found = selects(wanted, service["metadata"]["labels"])
                yield from (one for one in spec["endpoints"] if found and one["port"] in ports)


def selects(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return wanted.items() <= labels.items()


def relabeled(relabelings: list[dict[str, Any]], target: dict[str, str]) -> dict[str, str]:
    """Return the labels of a target's series after the relabelings, applied one by one."""
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
