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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("imag.tag=x", "'imag' not allowed"),
        ("image.tagg=x", "at '/image': additional properties 'tagg' not allowed"),
        ("privileges.hostPid=true", "at '/privileges': additional properties 'hostPid' not"),
        ("podMonitor.intervall=15s", "at '/podMonitor': additional properties 'intervall' not"),
        ("resources.limit.memory=1Gi", "at '/resources': additional properties 'limit' not"),
        ("port=high", "at '/port': got string, want integer"),
        ("port=70000", "at '/port': maximum: got 70,000, want 65,535"),
        ("mode=deployment", "at '/mode': value must be one of 'daemonset', 'sidecar', 'templates'"),
        ("podMonitor=null", "at '': missing property 'podMonitor'"),
        ("nvidia=null", "at '': missing property 'nvidia'"),
        ("sidecar.uid=0", "at '/sidecar/uid': minimum: got 0, want 1"),
        ("nonRootUser.uid=0", "at '/nonRootUser/uid': minimum: got 0, want 1"),
        ("hostPaths.run=run", "at '/hostPaths/run': 'run' does not match pattern"),
        ("podMonitor.interval=often", "at '/podMonitor/interval': 'often' does not match"),
        ("grafana.url=grafana", "at '/grafana/url': 'grafana' does not match pattern"),
        ("image.digest=abc", "at '/image/digest': 'abc' does not match pattern"),
        ("volumeSizes.tmp=much", "at '/volumeSizes/tmp': 'much' does not match pattern"),
        ("networkPolicy.restrictEgress=DNS", "at '/networkPolicy/restrictEgress': got string"),
        (
            "tenantsPolicy.otherHostPaths={mnt}",
            "at '/tenantsPolicy/otherHostPaths/0': 'mnt' does not match pattern",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(
    helm3: Path, helm4: Path, value: str, message: str
) -> None:
    for helm in (helm3, helm4):
        assert message in chart.refusal(helm, value)


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
    ],
)
def test_values_that_contradict_each_other_are_refused(
    helm4: Path, values: tuple[str, ...], message: str
) -> None:
    assert message in chart.refusal(helm4, *values)


def test_a_configuration_of_comments_alone_is_an_empty_one(
    helm3: Path, helm4: Path, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("config:\n#  store: {}\n")
    for helm in (helm3, helm4):
        config, *_ = chart.of_kind(chart.render(helm, "--values", str(file)), "ConfigMap")
        assert yaml.safe_load(config["data"]["warpwatch.yaml"]) == {}


def test_half_a_cpu_may_be_a_number(helm4: Path) -> None:
    spec = chart.only(chart.render(helm4, "--set-json", "resources.limits.cpu=0.5"), "DaemonSet")
    (container,) = spec["spec"]["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert limits == {"cpu": 0.5, "memory": "1Gi", "ephemeral-storage": "1Gi"}


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
