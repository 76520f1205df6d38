"""Values: a misspelt key, a wrong type and a contradiction are refused, by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import chart, config_schema, schemas

SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())
# Helm itself sets these in a chart that another one depends on.
HELMS_OWN = {"enabled"}
# Values of the minor version before, which are ignored.
REMOVED = {"grafana", "fleet.shards"}
REFUSED = yaml.safe_load(Path(__file__).with_name("refused_values.yaml").read_text())


@pytest.mark.parametrize("wrong", REFUSED["wrong"])
def test_wrong_values_are_refused_by_name(helm3: Path, helm4: Path, wrong: dict[str, str]) -> None:
    for helm in (helm3, helm4):
        said = chart.refusal(helm, *wrong)
        assert [message for message in wrong.values() if message not in said] == []


@pytest.mark.parametrize("case", REFUSED["contradictory"], ids=lambda case: case["says"])
def test_values_that_contradict_each_other_are_refused(helm4: Path, case: Any) -> None:
    assert case["says"] in chart.refusal(helm4, *case["set"])


def test_a_sidecar_needs_a_cluster_that_has_them(helm4: Path, training: Path) -> None:
    said = chart.refusal(helm4, "warpwatch.mode=sidecar", chart=training, version="1.28")
    assert "the sidecar needs Kubernetes 1.29" in said


def test_half_a_cpu_may_be_a_number(helm4: Path) -> None:
    objects = chart.render(helm4, "--set-json", "resources.limits.cpu=0.5")
    (container,) = chart.daemon_set(objects)["containers"]
    assert container["resources"]["limits"]["cpu"] == 0.5


def test_the_schema_and_the_defaults_have_the_same_keys() -> None:
    defaults = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert keys_of(SCHEMA) - HELMS_OWN - REMOVED == written(defaults, SCHEMA)


def test_removed_values_are_ignored(helm4: Path) -> None:
    removed = ["--set", "grafana.url=http://grafana,fleet.shards=2"]
    assert chart.render(helm4, *removed) == chart.render(helm4)


def test_the_schema_of_config_is_the_daemons_and_the_fleets(request):
    path = chart.CHART / "values.schema.json"
    now = config_schema.spliced(path.read_text())
    if request.config.getoption("--update-golden"):
        path.write_text(now)
    assert path.read_text() == now


@pytest.mark.parametrize(
    ("value", "of_kubernetes"), [("tolerations", "Toleration"), ("claims", "ResourceClaim")]
)
def test_what_pods_take_has_the_fields_of_kubernetes(value: str, of_kubernetes: str) -> None:
    definitions = SCHEMA["definitions"]
    ours = definitions.get(value) or definitions["resources"]["properties"][value]
    assert set(ours["items"]["properties"]) == schemas.fields(of_kubernetes, chart.VERSIONS[1])


def test_every_section_is_closed_or_free_on_purpose() -> None:
    free = {"updateStrategy", "affinity", "dnsConfig", "global"}
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
        if not value.get("$ref", "").endswith(("/resources", "/Config")):
            keys |= keys_of(value, f"{prefix}{key}.")
    return {key for key in keys if not key.startswith("imagePullSecrets.")}


def written(values: dict[str, Any], node: dict[str, Any], prefix: str = "") -> set[str]:
    keys = set()
    for key, value in values.items():
        keys.add(prefix + key)
        below = resolved(node)["properties"].get(key, {})
        closed = "properties" in resolved(below) and not below.get("$ref", "").endswith(
            ("/resources", "/Config")
        )
        if closed:
            keys |= written(value, below, f"{prefix}{key}.")
    return keys
