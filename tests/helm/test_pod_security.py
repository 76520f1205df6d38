"""Every pod of ours against Kubernetes' level "restricted", but for what docs/security.md names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helm import chart
from tests.helm.pod_security import violations
from tests.helm.trainings import pod_of

ROOT_AND_FOLDERS = {
    "HostPath Volumes",
    "Volume Types",
    "Running as Non-root",
    "Running as Non-root user",
}
# What a scenario's DaemonSet breaks, where that is not the default's.
EXCEPTIONS = {
    "gke.yaml": {
        *ROOT_AND_FOLDERS,
        "Privileged Containers",
        "Privilege Escalation",
        "Capabilities",
    },
    "mig-values.yaml": {*ROOT_AND_FOLDERS, "Capabilities"},
    "nonroot-shared-values.yaml": {"HostPath Volumes", "Volume Types"},
    "nonroot-values.yaml": set(),
    "openshift.yaml": {*ROOT_AND_FOLDERS, "SELinux"},
    "privileges-values.yaml": {
        *ROOT_AND_FOLDERS,
        "Privileged Containers",
        "Privilege Escalation",
        "Capabilities",
        "Host Namespaces",
        "Host Ports",
    },
}


def daemon_set_of(objects: tuple[chart.Object, ...]) -> chart.Object:
    spec: chart.Object = chart.only(objects, "DaemonSet")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("name", [n for n in chart.SCENARIOS if not n.startswith("sidecar")])
def test_a_daemons_pod_breaks_what_is_listed_and_nothing_else(helm4: Path, name: str) -> None:
    spec = daemon_set_of(chart.scenario(helm4, name))
    assert violations(spec) == EXCEPTIONS.get(name, ROOT_AND_FOLDERS)


@pytest.mark.parametrize("name", chart.SCENARIOS)
def test_the_releases_test_is_restricted(helm4: Path, name: str) -> None:
    """But on the host's network, where its daemon is."""
    for pod in chart.of_kind(chart.scenario(helm4, name), "Pod"):
        allowed = {"Host Namespaces"} if name == "privileges-values.yaml" else set()
        assert violations(pod["spec"]) == allowed


def test_a_type_for_selinux_is_an_exception_too(helm4: Path) -> None:
    spec = daemon_set_of(chart.render(helm4, "--set", "seLinuxOptions.type=spc_t"))
    assert violations(spec) == {*ROOT_AND_FOLDERS, "SELinux"}


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


def test_the_documentation_gives_the_reason_of_each_exception() -> None:
    listed = ROOT_AND_FOLDERS.union(*EXCEPTIONS.values(), {"SELinux"})
    section = (chart.ROOT / "docs/security.md").read_text().partition("`restricted`.**")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| **")]
    assert {name for row in rows for name in re.findall(r"\*\*(.+?)\*\*", row)} == listed


NOTHING: chart.Object = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {
            "name": "x",
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
    ],
}
Change = Callable[[chart.Object], object]


def container(**values: object) -> Change:
    return lambda spec: spec["containers"][0].update(values)


def context(**values: object) -> Change:
    return lambda spec: spec["containers"][0]["securityContext"].update(values)


def pod(**values: object) -> Change:
    return lambda spec: spec.update(values)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (pod(), set()),
        (pod(hostIPC=True), {"Host Namespaces"}),
        (pod(volumes=[{"name": "a", "hostPath": {}}]), {"HostPath Volumes", "Volume Types"}),
        (pod(volumes=[{"name": "a", "nfs": {}}]), {"Volume Types"}),
        (pod(securityContext={}), {"Running as Non-root", "Seccomp"}),
        (pod(initContainers=[{"name": "y"}]), {"Privilege Escalation", "Capabilities"}),
        (context(privileged=True), {"Privileged Containers"}),
        (context(allowPrivilegeEscalation=None), {"Privilege Escalation"}),
        (context(runAsNonRoot=False), {"Running as Non-root"}),
        (context(runAsUser=0), {"Running as Non-root user"}),
        (context(seccompProfile={"type": "Unconfined"}), {"Seccomp"}),
        (context(appArmorProfile={"type": "Unconfined"}), {"AppArmor"}),
        (context(procMount="Unmasked"), {"/proc Mount Type"}),
        (context(seLinuxOptions={"type": "spc_t"}), {"SELinux"}),
        (context(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}), set()),
        (context(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}), {"Capabilities"}),
        (container(ports=[{"containerPort": 1, "hostPort": 1}]), {"Host Ports"}),
        (
            container(livenessProbe={"httpGet": {"host": "10.0.0.1"}}),
            {"Host Probes / Lifecycle Hooks"},
        ),
    ],
)
def test_the_check_itself_finds_what_breaks_a_rule(change: Change, broken: set[str]) -> None:
    spec = copy.deepcopy(NOTHING)
    change(spec)
    assert violations(spec) == broken
