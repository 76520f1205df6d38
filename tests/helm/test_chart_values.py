"""Values: a misspelt key, a wrong type and a contradiction are refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import chart

SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())
# What Helm itself hands to a chart that another one depends on.
HELMS_OWN = {"enabled"}
FLEET = ("fleet.enabled=true", "token.create=true", "token.allowPlainPeers=true")
INJECTION = "fleet.kubernetes.injection"
UNREADABLE = "fleet.enabled needs the daemons' token"


# Helm lists all that is wrong, so that values which do not overlap can be given together.
WRONG = {
    "imag.tag=x": "'imag' not allowed",
    "image.tagg=x": "at '/image': additional properties 'tagg' not allowed",
    "privileges.hostPid=true": "at '/privileges': additional properties 'hostPid' not",
    "podMonitor.intervall=15s": "at '/podMonitor': additional properties 'intervall' not",
    "resources.limit.memory=1Gi": "at '/resources': additional properties 'limit' not",
    "port=high": "at '/port': got string, want integer",
    "mode=deployment": "at '/mode': value must be one of 'daemonset', 'sidecar', 'templates'",
    "sidecar.uid=0": "at '/sidecar/uid': minimum: got 0, want 1",
    "nonRootUser.uid=0": "at '/nonRootUser/uid': minimum: got 0, want 1",
    "hostPaths.run=run": "at '/hostPaths/run': 'run' does not match pattern",
    "podMonitor.interval=often": "at '/podMonitor/interval': 'often' does not match",
    "grafana.url=grafana": "at '/grafana/url': 'grafana' does not match pattern",
    "image.digest=abc": "at '/image/digest': 'abc' does not match pattern",
    "volumeSizes.tmp=much": "at '/volumeSizes/tmp': 'much' does not match pattern",
    "networkPolicy.restrictEgress=DNS": "at '/networkPolicy/restrictEgress': got string",
    "tenantsPolicy.otherHostPaths={mnt}": (
        "at '/tenantsPolicy/otherHostPaths/0': 'mnt' does not match pattern"
    ),
}
WRONG_TOO = {
    "port=70000": "at '/port': maximum: got 70,000, want 65,535",
    "nvidia=null": "at '': missing property 'nvidia'",
}


@pytest.mark.parametrize("wrong", [WRONG, WRONG_TOO])
def test_wrong_values_are_refused_by_name(helm3: Path, helm4: Path, wrong: dict[str, str]) -> None:
    for helm in (helm3, helm4):
        said = chart.refusal(helm, *wrong)
        assert [message for message in wrong.values() if message not in said] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ("config.http.listen=:1",),
            "config.http.listen is the chart's own; set the value address",
        ),
        (("config.http.token_file=/x",), "set the value token instead"),
        (("config.http.web_config=/x",), "set the value tls or webConfig instead"),
        (
            ("existingConfigMap=a", "config.http.public_url=http://a"),
            "config and existingConfigMap exclude each other",
        ),
        (
            ("podMonitor.enabled=true", "serviceMonitor.enabled=true"),
            "podMonitor and serviceMonitor would scrape every pod twice",
        ),
        (("nonRoot=true", "privileges.kernelLog=true"), "need root"),
        (("tls.clientAuth=true",), "tls.clientAuth needs tls.existingSecret"),
        (("token.create=true", "token.existingSecret=a"), "exclude each other"),
        (("tls.existingSecret=a", "webConfig.existingSecret=a"), "exclude each other"),
        (
            ("mode=sidecar", "token.create=true"),
            "a sidecar takes no tls, webConfig or token.create",
        ),
        (
            ("networkPolicy.egress[0].ports[0].port=443",),
            "set networkPolicy.restrictEgress",
        ),
        (("mode=sidecar", "tenantsPolicy.enabled=true"), "tenantsPolicy is for the host folders"),
        (("nonRoot=true", "tenantsPolicy.enabled=true"), "tenantsPolicy is for the host folders"),
        (
            ("tenantsPolicy.enabled=true", "tenantsPolicy.otherHostPaths={/mnt,/run}"),
            "otherHostPaths: /run would give tenants more of /run/warpwatch than their own part",
        ),
        (
            ("tenantsPolicy.enabled=true", "tenantsPolicy.otherHostPaths={/var/lib/warpwatch/x}"),
            "otherHostPaths: /var/lib/warpwatch/x would give tenants more",
        ),
        (
            ("tls.existingSecret=a", "tls.clientAuth=true", "serviceMonitor.enabled=true"),
            "a certificate of its own; set serviceMonitor.tlsConfig",
        ),
        (("mode=templates", "dashboards.enabled=true"), "mode templates makes no objects"),
        (("mode=templates", "token.create=true"), "token.create belongs to the release with"),
        (("mode=sidecar", "serviceMonitor.enabled=true"), "serviceMonitor needs mode daemonset"),
        (("grafana.tokenSecret=a",), "grafana.tokenSecret needs grafana.url"),
        (("fleet.enabled=true",), UNREADABLE),
        (("fleet.enabled=true", "token.create=true"), UNREADABLE),
        (
            ("fleet.enabled=true", "token.create=true", "webConfig.existingSecret=web"),
            UNREADABLE,
        ),
        ((*FLEET, "fleet.kubernetes.taints=true"), "set fleet.kubernetes.conditions"),
        ((*FLEET, f"{INJECTION}.enabled=true", "nonRoot=true"), "injection needs host folders"),
        (
            (*FLEET, f"{INJECTION}.enabled=true", f"{INJECTION}.existingSecret=a"),
            "existingSecret needs caBundle",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    helm4: Path, values: tuple[str, ...], message: str
) -> None:
    assert message in chart.refusal(helm4, *values)


def test_a_sidecar_needs_a_cluster_that_has_them(helm4: Path, training: Path) -> None:
    said = chart.refusal(helm4, "warpwatch.mode=sidecar", chart=training, version="1.28")
    assert "the sidecar needs Kubernetes 1.29" in said


def test_half_a_cpu_may_be_a_number(helm4: Path) -> None:
    objects = chart.render(helm4, "--set-json", "resources.limits.cpu=0.5")
    (container,) = chart.daemon_set(objects)["containers"]
    assert container["resources"]["limits"]["cpu"] == 0.5


def test_the_schema_and_the_defaults_have_the_same_keys() -> None:
    defaults = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert keys_of(SCHEMA) - HELMS_OWN == written(defaults, SCHEMA)


def test_every_section_is_closed_or_free_on_purpose() -> None:
    free = {"config", "updateStrategy", "affinity", "dnsConfig", "global"}
    for key, value in SCHEMA["properties"].items():
        node = resolved(value)
        if node.get("type") == "object" and "properties" in node:
            assert node["additionalProperties"] is False, key
        elif node.get("type") == "object" and "additionalProperties" not in node:
            assert key in free, key


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else node


def keys_of(node: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted, of every closed object; resources may leave keys out."""
    keys = set()
    for key, value in resolved(node).get("properties", {}).items():
        keys.add(prefix + key)
        if not value.get("$ref", "").endswith("/resources"):
            keys |= keys_of(value, f"{prefix}{key}.")
    return {key for key in keys if not key.startswith("imagePullSecrets.")}


def written(values: dict[str, Any], node: dict[str, Any], prefix: str = "") -> set[str]:
    """The keys of the defaults as far as the schema goes."""
    keys = set()
    for key, value in values.items():
        keys.add(prefix + key)
        below = resolved(node)["properties"].get(key, {})
        closed = "properties" in resolved(below) and not below.get("$ref", "").endswith(
            "/resources"
        )
        if closed:
            keys |= written(value, below, f"{prefix}{key}.")
    return keys
