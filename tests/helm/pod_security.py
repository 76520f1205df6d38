"""The rules of Kubernetes' Pod Security level "restricted", as the standard lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.helm.chart import Object

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_SELINUX_TYPES = {None, "", *(f"container_{kind}t" for kind in ("", "init_", "kvm_", "engine_"))}


def violations(spec: Object) -> set[str]:
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
        # What the pod says holds where the container says nothing.
        found |= set(_of_context({**pod_context, **own}))
        found |= set(_of_capabilities(own.get("capabilities", {})))
        found |= set(_of_container(container, bool(spec.get("hostNetwork"))))
    return found


def _of_pod(spec: Object, context: Object) -> Iterator[str]:
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


def _of_context(context: Object) -> Iterator[str]:
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


def _of_capabilities(capabilities: Object) -> Iterator[str]:
    drops_all = "ALL" in capabilities.get("drop", [])
    if not drops_all or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "Capabilities"


def _of_container(container: Object, host_network: bool) -> Iterator[str]:
    # On the host's network the API server makes every port one of the host.
    if any(each.get("hostPort") or host_network for each in container.get("ports", [])):
        yield "Host Ports"
    probes = [container.get(f"{kind}Probe", {}) for kind in ("liveness", "readiness", "startup")]
    hooks = container.get("lifecycle", {}).values()
    for action in [*probes, *hooks]:
        if any(action.get(kind, {}).get("host") for kind in ("httpGet", "tcpSocket")):
            yield "Host Probes / Lifecycle Hooks"
