"""The alerts about anomalies, evaluated by promtool on what agents and a fleet really export."""

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from warpwatch_dashboards import rule_files
from warpwatch_exporters.prometheus import render
from warpwatch_telemetry.anomalies import FLEET_KINDS, KINDS, Anomaly, Severity
from warpwatch_telemetry.state import State

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
# Kinds whose critical anomalies have an alert of another name.
SPLIT = {"xid", "row_remap", "thermal_throttle", "nvlink_error"}
# How long alerts wait, where it is not a minute.
AT_ONCE = {"hang", "oom", "crash", "xid", "ecc_uncorrectable", "row_remap", "nvlink_error"}
AT_ONCE |= {"network_link_down", "device_needs_service"}
WAITS_S = dict.fromkeys(AT_ONCE, 0) | {"device_idle": 300}
WAITS_S |= dict.fromkeys(("device_lost", "clock_drop", "pcie_degraded"), 120)
XID = "a critical xid: GPU 3 on gpu-1, rank 3 of xid-critical (ns/ml), since 01:46 UTC on 09 Sep"
LINK = "https://gpu-1/?show=xid-critical#findings"
TEXTS = {
    "summary": XID,
    "description": f"The NVIDIA driver has reported an error of the GPU. {LINK}",
    "runbook_url": "https://github.com/warpwatch/warpwatch/blob/main/docs/runbooks/WarpwatchXid.md",
}
LABELS = {"kind": "xid", "severity": "critical", "scope": "hardware", "summary": XID, "link": LINK}
LABELS |= {"rank": "3", "owner": "ns/ml", "namespace": "ml", "gpu": "3", "uuid": "GPU-3"}
LABELS |= {"training_job": "xid-critical", "job": "warpwatch", "node": "gpu-1"}
# Prometheus adds these labels where the chart's monitors say so, and on bare hosts by default.
SITES = {
    "kubernetes": ({"instance": "gpu-1", "node": "gpu-1"}, {"instance": "warpwatch-fleet-0"}),
    "bare hosts": ({"instance": "10.0.0.1:9400"}, {"instance": "10.0.0.9:9401"}),
}


def found(kind: str, severity: Severity, **about: Any) -> Anomaly:
    """Its job says what it is: alerts have only their rule's severity."""
    job = f"{kind}-{severity}"
    default: dict[str, Any] = {"time": 1e9, "id": job, "job": job, "owner": "ns/ml"}
    default |= {"rank": 3, "device": "GPU-3", "gpu": 3, "first_summary": f"a {severity} {kind}"}
    return Anomaly(severity=severity, summary="…", kind=kind, **default | about)


def agent() -> bytes:
    every = tuple(found(*one) for one in product(KINDS, SEVERITIES))
    # Newer ones of one kind, far more than are described.
    newer: dict[str, Any] = {"time": 1e9 + 1, "job": "many"}
    many = tuple(found("comm_slow", "info", rank=rank, **newer) for rank in range(250))
    return render(State(1e9, "1", "gpu-1", anomalies=many + every, public_url="https://gpu-1"))


def fleet() -> bytes:
    every = product(sorted(FLEET_KINDS), SEVERITIES)
    judged = tuple(found(*one, node="gpu-2", judged_by="fleet") for one in every)
    return render(State(1e9, "1", "fleet-host", anomalies=judged))


def scraped(
    page: bytes, target: dict[str, str], values: str = "_ _ %sx30"
) -> Iterator[dict[str, str]]:
    """The series after ``honorLabels``: own labels stay, the target's are added."""
    for line in page.decode().splitlines():
        if line.startswith("warpwatch_anomaly"):
            name, own = line.partition("{")[0], dict(re.findall(r'(\w+)="([^"]*)"', line))
            labels = ",".join(f'{key}="{value}"' for key, value in (target | own).items())
            yield {"series": f"{name}{{{labels}}}", "values": values % line.rpartition(" ")[2]}


def expected(after_s: int) -> Iterator[tuple[str, str, str]]:
    """Alert, job and node of all that have fired that long after they were found."""
    for kind, severity in product(KINDS, SEVERITIES):
        if severity == "info" or WAITS_S.get(kind, 60) > after_s:
            continue
        name = "Warpwatch" + "".join(part.capitalize() for part in kind.split("_"))
        name += "Critical" * (kind in SPLIT and severity == "critical")
        yield name, f"{kind}-{severity}", "gpu-1"
        if kind in FLEET_KINDS:
            yield name, f"{kind}-{severity}", "gpu-2"


@pytest.mark.parametrize("site", SITES)
def test_every_anomaly_alerts_once_with_its_node_and_none_of_severity_info(check_rules, site):
    agents, fleets = ({"job": "warpwatch"}, {"job": "warpwatch-fleet"})
    series = [
        *scraped(agent(), agents | SITES[site][0]),
        *scraped(fleet(), fleets | SITES[site][1]),
    ]
    fired = 'ALERTS{alertstate="firing"}'
    checks = []
    for after_s in (0, 60, 120, 300):
        alerts = expected(after_s)
        samples = [
            {"labels": f'{{alertname="{name}", {labels}, node="{node}"}}', "value": 1}
            for name, job, node in alerts
            for labels in [f'kind="{job.rpartition("-")[0]}", training_job="{job}"']
        ]
        promql = f"count by (alertname, kind, training_job, node) ({fired})"
        checks.append({"expr": promql, "eval_time": f"{60 + after_s}s", "exp_samples": samples})
    told = {"exp_labels": LABELS | SITES[site][0], "exp_annotations": TEXTS}
    texts = {"eval_time": "90s", "alertname": "WarpwatchXidCritical", "exp_alerts": [told]}
    case: dict[str, Any] = {"interval": "30s", "input_series": series, "promql_expr_test": checks}
    case["alert_rule_test"] = [texts]
    check_rules(document(case))


def document(case: dict[str, Any]) -> dict[str, Any]:
    rules = [str(rule_files.FOLDER / "anomalies.yaml")]
    return {"rule_files": rules, "evaluation_interval": "30s", "tests": [case]}


IN_POD = agent().replace(b'pod=""', b'pod="llama-0"')


# For 90 s no worker has the job; the pod of a rank is removed.
@pytest.mark.parametrize(
    ("pages", "instances", "after", "on"),
    [
        ((fleet(), fleet()), ("fleet-0", "fleet-1"), 13, "gpu-2"),
        ((IN_POD, agent()), ("gpu-1", "gpu-1"), 11, "gpu-1"),
    ],
)
def test_an_alert_goes_on_when_its_worker_or_pod_changes(check_rules, pages, instances, after, on):
    series = list[dict[str, str]]()
    every = zip(pages, instances, ("%sx10 stale", f"_x{after} %sx20"), strict=True)
    for page, instance, values in every:
        series += scraped(page, {"job": "warpwatch", "instance": instance}, values)
    named = {(name, job) for name, job, node in expected(300) if node == on}
    samples = [
        {"labels": f'{{alertname="{name}", training_job="{job}"}}', "value": 1}
        for name, job in named
    ]
    span = "ALERTS_FOR_STATE[20m]"
    promql = f"count by (alertname, training_job) (changes({span}) == 0)"
    told = {"expr": promql, "eval_time": "14m", "exp_samples": samples}
    always = f"count by (alertname, training_job) (count_over_time({span}) >= 27)"
    checks = [told, told | {"expr": always}]
    case = {"interval": "30s", "input_series": series, "promql_expr_test": checks}
    check_rules(document(case))
