"""What containers may do: Kubernetes' level "restricted", but for what docs/security.md names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helm import chart
from tests.helm.chart import pod_of
from tests.helm.pod_security import violations

ROOT_AND_FOLDERS = {
    "HostPath Volumes",
    "Volume Types",
    "Running as Non-root",
    "Running as Non-root user",
}
PRIVILEGED = {*ROOT_AND_FOLDERS, "Privileged Containers", "Privilege Escalation", "Capabilities"}
# What a scenario's DaemonSet breaks, where that is not the default's.
EXCEPTIONS = {
    "gke.yaml": PRIVILEGED,
    "mig-values.yaml": {*ROOT_AND_FOLDERS, "Capabilities"},
    "nonroot-shared-values.yaml": {"HostPath Volumes", "Volume Types"},
    "nonroot-values.yaml": set(),
    "openshift.yaml": {*ROOT_AND_FOLDERS, "SELinux"},
    "privileges-values.yaml": {*PRIVILEGED, "Host Namespaces", "Host Ports"},
}


@pytest.mark.parametrize("name", chart.SCENARIOS)
def test_a_pod_breaks_what_is_listed_and_has_no_token_and_writes_to_volumes_of_a_size(
    helm4: Path, name: str
) -> None:
    """The release's test breaks nothing, but on the host's network, where its daemon is."""
    objects = chart.scenario(helm4, name)
    daemons = [each["spec"]["template"]["spec"] for each in chart.of_kind(objects, "DaemonSet")]
    tests = [each["spec"] for each in chart.of_kind(objects, "Pod")]
    for spec in daemons:
        assert violations(spec) == EXCEPTIONS.get(name, ROOT_AND_FOLDERS)
    for spec in tests:
        assert violations(spec) == {"Host Namespaces"} & EXCEPTIONS.get(name, set())
    for spec in (*daemons, *tests):
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
        for volume in spec.get("volumes", []):
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


def test_a_fleet_that_asks_nothing_has_no_rights_and_no_token(helm4: Path) -> None:
    objects = chart.scenario(helm4, "fleet-values.yaml")
    pod = chart.only(objects, "StatefulSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert chart.of_kind(objects, "ClusterRole") == []


@pytest.mark.parametrize(
    ("mode", "broken"),
    [("sidecar", set()), ("daemonset", {"HostPath Volumes", "Volume Types"})],
)
def test_what_we_bring_into_a_training_pod_is_restricted(
    helm4: Path, training: Path, mode: str, broken: set[str]
) -> None:
    """Beside the DaemonSet but for the two folders; the training's own container is its user's."""
    spec = pod_of(helm4, training, f"mode={mode}")
    assert violations({**spec, "containers": []}) == broken
    # The kubelet sums up what containers may store and evicts the pod whose volumes exceed it.
    for container in spec["initContainers"]:
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_the_documentation_gives_the_reason_of_each_exception() -> None:
    listed = ROOT_AND_FOLDERS.union(*EXCEPTIONS.values())
    section = (chart.ROOT / "docs/security.md").read_text().partition("`restricted`.**")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| **")]
    assert {name for row in rows for name in re.findall(r"\*\*(.+?)\*\*", row)} == listed


def test_by_default_root_sees_three_folders_of_the_host(helm4: Path) -> None:
    spec = chart.daemon_set(chart.render(helm4))
    paths = {each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    kubelets = {"/var/lib/kubelet/pod-resources", "/var/log/pods"}
    assert paths == {"/run/warpwatch", "/var/lib/warpwatch"} | kubelets
    mounts = chart.mounts_of(spec["containers"][0])
    for name in ("pod-resources", "pod-logs", "config"):
        assert mounts[name]["readOnly"] is True


def test_a_policy_lets_everybody_in_on_the_port_alone(helm4: Path) -> None:
    policy = chart.only(chart.render(helm4, "--set", "port=9500"), "NetworkPolicy")["spec"]
    ports = [{"port": 9500, "protocol": "TCP"}, {"port": 9401, "protocol": "TCP"}]
    assert (policy["policyTypes"], policy["ingress"]) == (["Ingress"], [{"ports": ports}])


def test_a_policy_that_names_who_comes_in_lets_in_fleet_and_test(helm4: Path) -> None:
    objects = chart.scenario(helm4, "network-policy-values.yaml")
    (rule,) = chart.only(objects, "NetworkPolicy")["spec"]["ingress"]
    _, ours = rule["from"]
    selected = ours["podSelector"]["matchLabels"].items()
    pods = [chart.only(objects, "DaemonSet")["spec"]["template"], chart.only(objects, "Pod")]
    assert all(selected <= pod["metadata"]["labels"].items() for pod in pods)


def test_a_sidecars_series_cannot_say_that_they_are_anothers(helm4: Path) -> None:
    spec = chart.only(chart.scenario(helm4, "sidecar-values.yaml"), "PodMonitor")["spec"]
    assert "honorLabels" not in spec["podMetricsEndpoints"][0]
