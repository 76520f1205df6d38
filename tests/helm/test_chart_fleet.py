"""The fleet beside the DaemonSet: it follows the daemons of its release, and needs their token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm import chart
from warpwatch_daemon.config import loading
from warpwatch_fleet.config import FleetFile

NEEDED = ("fleet.enabled=true", "token.create=true", "tls.existingSecret=warpwatch-tls")


def fleet_of(helm: Path, *values: str) -> chart.Object:
    sets = [argument for value in (*NEEDED, *values) for argument in ("--set", value)]
    return chart.only(chart.render(helm, *sets), "StatefulSet")


def environment(stateful: chart.Object) -> dict[str, str]:
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", "7") for each in container["env"]}


def test_the_variables_are_a_configuration_of_the_fleet(helm4: Path) -> None:
    stateful = fleet_of(helm4, "fleet.shards=9", "fleet.port=9500")
    config = loading.load_as(FleetFile, None, environment(stateful)).fleet
    assert config.targets_dns == "warpwatch-peers.monitoring.svc:9400"
    assert (config.shard.index, config.shard.of) == (7, 9)
    assert config.listen.endswith(":9500")
    assert str(config.token_file) == "/etc/warpwatch-token/token"
    assert config.agents.token_file == config.token_file
    assert str(config.agents.ca_file) == "/etc/warpwatch-web/ca.crt"
    assert not config.agents.allow_plain
    assert stateful["spec"]["replicas"] == 9


def test_what_it_names_is_there(helm4: Path) -> None:
    objects = chart.scenario(helm4, "fleet-values.yaml")
    services = {each["metadata"]["name"] for each in chart.of_kind(objects, "Service")}
    stateful = chart.only(objects, "StatefulSet")
    assert {"warpwatch-peers", stateful["spec"]["serviceName"]} <= services
    spec = stateful["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in spec["volumes"]}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert container["livenessProbe"]["httpGet"]["port"] == "probes"
    (policy,) = (
        each
        for each in chart.of_kind(objects, "NetworkPolicy")
        if each["metadata"]["name"] == "warpwatch-fleet"
    )
    (ingress,) = policy["spec"]["ingress"]
    assert {each["port"] for each in ingress["ports"]} == set(ports.values())
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= (
        stateful["spec"]["template"]["metadata"]["labels"].items()
    )


def test_nothing_of_it_is_there_without_being_asked_for(helm4: Path) -> None:
    assert chart.of_kind(chart.render(helm4), "StatefulSet") == []


@pytest.mark.parametrize(
    "values",
    [
        ("fleet.enabled=true",),
        ("fleet.enabled=true", "token.create=true"),
        ("fleet.enabled=true", "token.create=true", "webConfig.existingSecret=web"),
    ],
)
def test_a_fleet_that_could_not_read_the_daemons_is_refused(
    helm4: Path, values: tuple[str]
) -> None:
    assert "fleet.enabled needs the daemons' token" in chart.refusal(helm4, *values)
