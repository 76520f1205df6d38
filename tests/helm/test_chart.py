"""What the chart makes in every scenario of helm/warpwatch/ci, with Helm 3 and Helm 4."""

from __future__ import annotations

import tarfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.helm import chart, schemas
from warpwatch._version import __version__


def test_the_charts_application_is_this_version() -> None:
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == __version__


@pytest.mark.parametrize("name", ["default-values.yaml", "sidecar-values.yaml"])
def test_lint_has_nothing_to_say(helm3: Path, helm4: Path, name: str) -> None:
    for helm in (helm3, helm4):
        values = str(chart.CHART / "ci" / name)
        done = chart.run(helm, "lint", "--strict", str(chart.CHART), "--values", values)
        assert done.returncode == 0, done.stdout
        assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("name", chart.SCENARIOS)
def test_the_cluster_knows_every_field(helm3: Path, helm4: Path, name: str) -> None:
    for each in chart.scenario(helm4, name):
        for version in chart.versions(name):
            schemas.check(each, version)
    older = [each for each in chart.scenario(helm3, name) if each["kind"] != "Secret"]
    # A Secret's token is random.
    assert older == [each for each in chart.scenario(helm4, name) if each["kind"] != "Secret"]


def test_the_check_itself_finds_a_misspelt_field(helm4: Path) -> None:
    daemon_set = chart.only(chart.scenario(helm4, "default-values.yaml"), "DaemonSet")
    spec = {**daemon_set["spec"], "updateStrategie": {}}
    with pytest.raises(kubernetes_validate.ValidationError, match="updateStrategie"):
        schemas.check({**daemon_set, "spec": spec}, "1.37")
    monitors = chart.scenario(helm4, "prometheus-operator-values.yaml")
    monitor = chart.only(monitors, "PodMonitor")
    with pytest.raises(jsonschema.ValidationError, match="jobLable"):
        schemas.check({**monitor, "spec": {**monitor["spec"], "jobLable": "x"}}, "1.37")


OF_THE_CLUSTER = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "MutatingWebhookConfiguration",
    "PriorityClass",
    "SecurityContextConstraints",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


def test_names_and_namespaces_are_the_releases(helm4: Path) -> None:
    for name in chart.SCENARIOS:
        for each in chart.scenario(helm4, name):
            namespaced = each["kind"] not in OF_THE_CLUSTER
            assert each["metadata"].get("namespace") == ("monitoring" if namespaced else None)
            assert each["metadata"]["name"].startswith(("warpwatch", "captures.warpwatch"))


def test_a_package_holds_dashboards_and_rules_and_no_code(
    helm3: Path, helm4: Path, tmp_path: Path
) -> None:
    links = chart.CHART / "dashboards"
    wanted = {path.relative_to(links) for path in links.rglob("*.json")} | {
        path.relative_to(links) for path in (links / "rules").glob("*.yaml")
    }
    wanted = {path for path in wanted if path.parts[0] != "provisioning"}
    for helm in (helm3, helm4):
        folder = tmp_path / helm.parent.name
        done = chart.run(helm, "package", str(chart.CHART), "--destination", str(folder))
        assert done.returncode == 0, done.stderr
        (package,) = folder.glob("warpwatch-*.tgz")
        with tarfile.open(package) as archive:
            names = [Path(name) for name in archive.getnames()]
        inside = Path("warpwatch/dashboards")
        held = {path.relative_to(inside) for path in names if inside in path.parents}
        assert held == wanted
        assert Path("warpwatch/values.schema.json") in names
        assert not [path for path in names if path.suffix == ".py" or "ci" in path.parts]


def test_an_own_service_account_without_a_token(helm4: Path) -> None:
    objects = chart.scenario(helm4, "default-values.yaml")
    account = chart.only(objects, "ServiceAccount")
    spec = chart.only(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert account["automountServiceAccountToken"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == account["metadata"]["name"]
    spec = chart.only(chart.scenario(helm4, "existing-config-values.yaml"), "DaemonSet")["spec"]
    assert spec["template"]["spec"]["serviceAccountName"] == "default"


def test_selectors_find_the_daemons_and_not_the_test(helm4: Path) -> None:
    objects = chart.scenario(helm4, "prometheus-operator-values.yaml")
    daemon_set = chart.only(objects, "DaemonSet")
    labels = daemon_set["spec"]["template"]["metadata"]["labels"].items()
    test_labels = chart.only(objects, "Pod")["metadata"]["labels"].items()
    selectors = [
        daemon_set["spec"]["selector"]["matchLabels"],
        chart.only(objects, "PodMonitor")["spec"]["selector"]["matchLabels"],
        chart.only(objects, "Service")["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector.items() <= labels
        assert not selector.items() <= test_labels
        assert "helm.sh/chart" not in selector


PAUSED = {
    "key": "nvidia.com/gpu.deploy.dcgm-exporter",
    "operator": "NotIn",
    "values": ["paused-for-driver-upgrade", "paused-for-mig-change"],
}


@pytest.mark.parametrize(("everywhere", "terms"), [(False, 5), (True, 1)])
def test_a_node_is_left_while_gpu_operator_needs_the_driver(
    helm4: Path, everywhere: bool, terms: int
) -> None:
    """Terms are alternatives: one without it would keep the pod."""
    sets = ("--set", "gpuNodesOnly=false") if everywhere else ()
    spec = chart.only(chart.render(helm4, *sets), "DaemonSet")["spec"]["template"]["spec"]
    wanted = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert len(wanted["nodeSelectorTerms"]) == terms
    assert all(PAUSED in each["matchExpressions"] for each in wanted["nodeSelectorTerms"])


def test_the_releases_test_runs_where_its_daemons_may(helm4: Path) -> None:
    objects = chart.scenario(helm4, "default-values.yaml")
    daemon_set = chart.only(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert chart.only(objects, "Pod")["spec"]["tolerations"] == daemon_set["tolerations"]


def test_more_volumes_are_mounted_into_the_daemon(helm4: Path) -> None:
    spec = chart.only(chart.scenario(helm4, "gke.yaml"), "DaemonSet")["spec"]["template"]
    assert spec["spec"]["volumes"][-1]["hostPath"] == {"path": "/home/kubernetes/bin/nvidia"}
    (container,) = spec["spec"]["containers"]
    assert container["volumeMounts"][-1]["mountPath"] == "/usr/local/nvidia"
