"""The configuration that the chart gives daemon and fleet is one that they take."""

from pathlib import Path

import pytest
import yaml

from tests.helm import chart
from warpwatch_daemon.config import Config
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime import loading


def config_maps(objects: tuple[chart.Object, ...]) -> dict[str, chart.Object]:
    return {each["metadata"]["name"]: each["data"] for each in chart.of_kind(objects, "ConfigMap")}


def loaded(objects: tuple[chart.Object, ...], folder: Path) -> Config:
    """As the daemon's container would load it, variables on top of the file."""
    pods = [chart.daemon_set(objects)] if chart.of_kind(objects, "DaemonSet") else []
    variables = {k: v for pod in pods for k, v in chart.environment(pod["containers"][0]).items()}
    # With existingConfigMap the file is the user's.
    data = config_maps(objects).get("warpwatch", {"warpwatch.yaml": "{}"})
    file = folder / "warpwatch.yaml"
    file.write_text(data["warpwatch.yaml"])
    return loading.load(Config, file, variables)


@pytest.mark.parametrize("name", chart.SCENARIOS)
def test_the_daemon_takes_every_file_and_variable(helm4: Path, name: str, tmp_path: Path) -> None:
    config = loaded(chart.scenario(helm4, name), tmp_path)
    # A sidecar's variables are in the pod of another chart.
    reads = {"gke.yaml", "privileges-values.yaml", "sidecar-values.yaml"}
    assert config.sources.kernel_log.enabled is (name in reads)


def checksum(helm: Path, *values: str) -> str:
    daemon_set = chart.only(chart.render(helm, *chart.sets(*values)), "DaemonSet")
    return str(daemon_set["spec"]["template"]["metadata"]["annotations"]["checksum/config"])


def test_a_change_that_is_reloaded_restarts_no_pod(helm4: Path) -> None:
    before = checksum(helm4, "config.store.max_bytes=1GiB")
    triggers = "config.triggers.captures_per_hour=2"
    assert checksum(helm4, "config.store.max_bytes=1GiB", triggers) == before
    assert checksum(helm4, "config.store.max_bytes=2GiB", triggers) != before


def test_the_variables_are_a_configuration_of_the_fleet(helm4: Path) -> None:
    values = ("fleet.enabled=true", "fleet.port=9500")
    needed = ("token.create=true", "tls.existingSecret=warpwatch-tls")
    stateful = chart.only(chart.render(helm4, *chart.sets(*values, *needed)), "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "7") for each in container["env"]}
    # A variable that is no key of the fleet is refused.
    assert loading.load(FleetFile, None, variables).fleet.listen.endswith(":9500")


def test_a_configuration_of_comments_alone_is_an_empty_one(helm3, helm4, tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text("config:\n#  store: {}\n")
    for helm in (helm3, helm4):
        data = config_maps(chart.render(helm, "--values", str(file)))["warpwatch"]
        assert yaml.safe_load(data["warpwatch.yaml"]) == {}
