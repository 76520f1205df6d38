"""The configuration that the chart gives the daemon is one that the daemon takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helm import chart
from warpwatch_daemon.cli import main
from warpwatch_daemon.config import loading
from warpwatch_daemon.config.sections import Config

DAEMON_SETS = [name for name in chart.SCENARIOS if not name.startswith("sidecar")]


def config_maps(objects: tuple[chart.Object, ...]) -> dict[str, chart.Object]:
    return {each["metadata"]["name"]: each["data"] for each in chart.of_kind(objects, "ConfigMap")}


def loaded(objects: tuple[chart.Object, ...], folder: Path) -> Config:
    """As the daemon's container would load it, variables on top of the file."""
    daemon_set = chart.only(objects, "DaemonSet")
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    # With existingConfigMap the file is the user's.
    data = config_maps(objects).get("warpwatch", {"warpwatch.yaml": "{}"})
    file = folder / "warpwatch.yaml"
    file.write_text(data["warpwatch.yaml"])
    return loading.load(file, chart.environment(container))


@pytest.mark.parametrize("name", chart.SCENARIOS)
def test_config_check_accepts_every_config_map(
    helm4: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = config_maps(chart.scenario(helm4, name)).get("warpwatch")
    if data is None:
        assert name == "existing-config-values.yaml"
        return
    file = tmp_path / "warpwatch.yaml"
    file.write_text(data["warpwatch.yaml"])
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: valid\n"


@pytest.mark.parametrize("name", DAEMON_SETS)
def test_the_daemon_takes_every_variable(helm4: Path, name: str, tmp_path: Path) -> None:
    config = loaded(chart.scenario(helm4, name), tmp_path)
    assert config.sources.kernel_log.enabled is (name in {"gke.yaml", "privileges-values.yaml"})


def test_what_is_written_arrives(helm4: Path, tmp_path: Path) -> None:
    config = loaded(chart.scenario(helm4, "config-values.yaml"), tmp_path)
    assert config.http.listen == ":9401"
    assert config.sources.host.interval_s == 5
    assert config.triggers.captures_per_hour == 2
    assert config.triggers.recipes["hang"] is None
    assert config.store.max_bytes == 20 * 2**30


def test_secrets_arrive_as_files_of_their_mounts(helm4: Path, tmp_path: Path) -> None:
    config = loaded(chart.scenario(helm4, "token-values.yaml"), tmp_path)
    assert config.http.listen == "10.0.0.1:9400"
    assert config.http.token_file == Path("/etc/warpwatch-token/token")
    assert config.exporters.grafana.url == "http://grafana.monitoring.svc"
    assert config.exporters.grafana.token_file == Path("/etc/warpwatch-grafana/token")


def test_a_certificate_becomes_a_web_config(helm4: Path, tmp_path: Path) -> None:
    objects = chart.scenario(helm4, "tls-values.yaml")
    assert loaded(objects, tmp_path).http.web_config == Path("/etc/warpwatch-web/web-config.yml")
    assert yaml.safe_load(config_maps(objects)["warpwatch-web"]["web-config.yml"]) == {
        "tls_server_config": {
            "cert_file": "tls.crt",
            "key_file": "tls.key",
            "client_ca_file": "ca.crt",
            "client_auth_type": "RequireAndVerifyClientCert",
        }
    }


def test_a_pod_of_ipv6_listens_on_its_address(helm4: Path) -> None:
    daemon_set = chart.only(chart.scenario(helm4, "default-values.yaml"), "DaemonSet")
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    variables = {
        name: value.replace("10.0.0.1", "fd00:10:1::7")
        for name, value in chart.environment(container).items()
    }
    assert loading.load(None, variables).http.listen == "fd00:10:1::7:9400"


def checksum(helm: Path, *values: str) -> str:
    sets = [argument for value in values for argument in ("--set", value)]
    metadata = chart.only(chart.render(helm, *sets), "DaemonSet")["spec"]["template"]["metadata"]
    return str(metadata["annotations"]["checksum/config"])


def test_a_change_that_is_reloaded_restarts_no_pod(helm4: Path) -> None:
    before = checksum(helm4, "config.store.max_bytes=1GiB")
    triggers = "config.triggers.captures_per_hour=2"
    assert checksum(helm4, "config.store.max_bytes=1GiB", triggers) == before
    assert checksum(helm4, "config.store.max_bytes=2GiB", triggers) != before
    daemon_set = chart.only(chart.scenario(helm4, "default-values.yaml"), "DaemonSet")
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    assert "--watch-config" in container["args"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "config"]
    # The kubelet never renews a subPath.
    assert "subPath" not in mount
