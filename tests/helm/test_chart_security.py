"""Permissions of containers: Kubernetes' level "restricted", except as docs/security.md says."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm import chart
from tests.helm.chart import pod_of

ROOT_AND_FOLDERS = {
    "HostPath Volumes", "Volume Types", "Running as Non-root", "Running as Non-root user",
}  # fmt: skip
PRIVILEGED = {*ROOT_AND_FOLDERS, "Privileged Containers", "Privilege Escalation", "Capabilities"}
# The rules that a scenario's DaemonSet breaks beyond the default's.
EXCEPTIONS = {
    "gke.yaml": PRIVILEGED, "mig-values.yaml": {*ROOT_AND_FOLDERS, "Capabilities"},
    "nonroot-shared-values.yaml": {"HostPath Volumes", "Volume Types"},
    "nonroot-values.yaml": set(), "openshift.yaml": {*ROOT_AND_FOLDERS, "SELinux"},
    "privileges-values.yaml": {*PRIVILEGED, "Host Namespaces", "Host Ports"},
}  # fmt: skip


@pytest.mark.parametrize("name", chart.SCENARIOS)
def test_a_pod_breaks_what_is_listed_and_has_no_token_and_writes_to_volumes_of_a_size(helm4, name):
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


def test_openshift_admits_the_accounts_of_all_pods(helm4):
    fleet = ("fleet.enabled", "fleet.kubernetes.events", "token.create", "token.allowPlainPeers")
    preset = str(chart.CHART / "presets/openshift.yaml")
    set_to = chart.sets(*(f"{name}=true" for name in fleet))
    objects = chart.render(helm4, "--values", preset, *set_to)
    specs = [each.get("spec", {}) for each in objects]
    pods = [spec.get("template", {}).get("spec", spec) for spec in specs]
    names = {pod.get("serviceAccountName", "default") for pod in pods if "containers" in pod}
    admitted = chart.only(objects, "SecurityContextConstraints")["users"]
    assert set(admitted) == {f"system:serviceaccount:monitoring:{name}" for name in names}


@pytest.mark.parametrize(
    ("mode", "broken"), [("sidecar", set()), ("daemonset", {"HostPath Volumes", "Volume Types"})]
)
def test_what_we_bring_into_a_training_pod_is_restricted(helm4, training, mode, broken):
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


_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
_SELINUX_TYPES = {None, "", *(f"container_{kind}t" for kind in ("", "init_", "kvm_", "engine_"))}


def violations(spec: chart.Object) -> set[str]:
    """The rules that a pod breaks, by the names of the standard."""
    containers = [
        each
        for kind in ("initContainers", "containers", "ephemeralContainers")
        for each in spec.get(kind, [])
    ]
    pod_context = spec.get("securityContext", {})
    found = set(_of_pod(spec, pod_context))
    for container in containers:
        own = container.get("securityContext", {})
        # The pod's settings hold where the container has none.
        found |= set(_of_context({**pod_context, **own}))
        found |= set(_of_capabilities(own.get("capabilities", {})))
        found |= set(_of_container(container, bool(spec.get("hostNetwork"))))
    return found


def _of_pod(spec: chart.Object, context: chart.Object) -> Iterator[str]:
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "Host Namespaces"
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if "hostPath" in kinds:
            yield "HostPath Volumes"
        if kinds - _VOLUMES:
            yield "Volume Types"
    # The standard has a list; ours set none.
    if context.get("sysctls"):
        yield "Sysctls"


def _of_context(context: chart.Object) -> Iterator[str]:
    if context.get("privileged"):
        yield "Privileged Containers"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "Privilege Escalation"
    if context.get("runAsNonRoot") is not True:
        yield "Running as Non-root"
    if context.get("runAsUser") == 0:
        yield "Running as Non-root user"
    if context.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
        yield "Seccomp"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
        yield "AppArmor"
    if context.get("procMount", "Default") != "Default":
        yield "/proc Mount Type"
    yield from _of_selinux(context.get("seLinuxOptions", {}))


def _of_selinux(options: dict[str, Any]) -> Iterator[str]:
    if options.get("type") not in _SELINUX_TYPES or options.get("user") or options.get("role"):
        yield "SELinux"


def _of_capabilities(capabilities: chart.Object) -> Iterator[str]:
    drops_all = "ALL" in capabilities.get("drop", [])
    if not drops_all or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "Capabilities"


def _of_container(container: chart.Object, host_network: bool) -> Iterator[str]:
    # On the host's network the API server makes every port one of the host.
    if any(each.get("hostPort") or host_network for each in container.get("ports", [])):
        yield "Host Ports"
    probes = [container.get(f"{kind}Probe", {}) for kind in ("liveness", "readiness", "startup")]
    hooks = container.get("lifecycle", {}).values()
    for action in [*probes, *hooks]:
        if any(action.get(kind, {}).get("host") for kind in ("httpGet", "tcpSocket")):
            yield "Host Probes / Lifecycle Hooks"
