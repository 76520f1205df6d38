"""Grafana's provisioning files: rules made from Prometheus', and their receivers."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from warpwatch_dashboards import rule_files
from warpwatch_telemetry.anomalies import KINDS

FOLDER = Path(rule_files.__file__).parent / "provisioning"


@cache
def document(name: str) -> Any:
    return yaml.load((FOLDER / name).read_text(), Loader=yaml.CSafeLoader)


def grafana_rules() -> dict[str, dict[str, Any]]:
    groups = document("alert-rules.yaml")["groups"]
    return {rule["title"]: rule for group in groups for rule in group["rules"]}


def test_a_rule_has_a_uid_that_grafana_takes() -> None:
    # Grafana's limits on uids; its folders hold a title once.
    uids = {rule["uid"] for rule in grafana_rules().values()}
    assert [uid for uid in uids if not re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", uid)] == []
    assert len(uids) == len(rule_files.alerts())


def test_texts_have_no_dollar_that_grafana_would_take_for_a_variable() -> None:
    for rule in grafana_rules().values():
        assert "$" not in "".join((*rule["annotations"].values(), *rule["labels"].values()))


def test_policies_send_to_contact_points_that_exist_and_to_people_as_well() -> None:
    (policy,) = document("notification-policies.yaml")["policies"]
    names = {point["name"] for point in document("contact-points.yaml")["contactPoints"]}
    receivers = [route["receiver"] for route in policy["routes"]]
    assert receivers == ["warpwatch", "warpwatch", policy["receiver"]]
    assert names == {"warpwatch"}
    assert all(route["continue"] for route in policy["routes"][:2])


def test_the_kinds_that_a_webhook_hears_of_are_those_that_a_capture_shows() -> None:
    (policy,) = document("notification-policies.yaml")["policies"]
    (expression,) = (
        matcher[2]
        for route in policy["routes"]
        for matcher in route.get("object_matchers", ())
        if matcher[0] == "kind"
    )
    heard = {kind for kind in KINDS if re.fullmatch(expression, kind)}
    shown = "step_regression step_drift step_spikes run_regression comm_slow straggler data_stall"
    assert heard == {*shown.split(), "gc_pause", "hang", "memory_leak", "memory_pressure"}
