"""What the containers may do, and which named value gives them more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm import chart
from tests.helm.trainings import pod_of


def daemon_of(helm: Path, *values: str) -> tuple[chart.Object, chart.Object]:
    """Pod and container of the daemon."""
    sets = [argument for value in values for argument in ("--set", value)]
    spec = chart.only(chart.render(helm, *sets), "DaemonSet")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize("name", chart.SCENARIOS)
def test_a_pod_cannot_ask_the_api_server_nor_write_but_to_volumes_of_a_size(
    helm4: Path, name: str
) -> None:
    """What "restricted" (test_pod_security.py) leaves open."""
    for spec in chart.pod_specs(chart.scenario(helm4, name)):
        assert spec["automountServiceAccountToken"] is False
        for container in chart.containers(spec):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
        for volume in spec.get("volumes", []):
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


def test_a_daemon_takes_one_core_at_most(helm4: Path) -> None:
    _, container = daemon_of(helm4)
    assert container["resources"] == {
        "requests": {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "64Mi"},
        "limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"},
    }


def test_volumes_of_a_pods_own_have_the_sizes_that_are_asked_for(helm4: Path) -> None:
    spec = chart.only(chart.scenario(helm4, "nonroot-values.yaml"), "DaemonSet")["spec"]
    found = {
        e["name"]: e["emptyDir"] for e in spec["template"]["spec"]["volumes"] if "emptyDir" in e
    }
    assert found == {
        "tmp": {"sizeLimit": "32Mi"},
        "own-run": {"medium": "Memory", "sizeLimit": "16Mi"},
        "own-data": {"sizeLimit": "256Mi"},
    }
    # Together and with the log less than the limit: no volume alone can have the pod evicted by it.
    spec, container = daemon_of(helm4, "nonRoot=true")
    sizes = [e["emptyDir"]["sizeLimit"] for e in spec["volumes"] if "emptyDir" in e]
    assert sizes == ["64Mi", "64Mi", "512Mi"]
    assert container["resources"]["limits"]["ephemeral-storage"] == "1Gi"


def test_a_training_pod_is_not_held_to_what_its_sidecar_may_store(
    helm4: Path, training: Path
) -> None:
    """The kubelet sums up what containers may store and evicts the pod whose volumes exceed it."""
    for spec in (pod_of(helm4, training), pod_of(helm4, training, "mode=sidecar")):
        for container in spec["initContainers"]:
            assert set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_by_default_root_sees_three_folders_of_the_host(helm4: Path) -> None:
    spec, container = daemon_of(helm4)
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (0, 0)
    paths = {each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    kubelets = {"/var/lib/kubelet/pod-resources", "/var/log/pods"}
    assert paths == {"/run/warpwatch", "/var/lib/warpwatch"} | kubelets
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    assert mounts["pod-resources"]["readOnly"] is True
    assert mounts["pod-logs"]["readOnly"] is True
    assert mounts["config"]["readOnly"] is True


def test_without_root_there_is_no_folder_of_the_host_and_no_pod_name(helm4: Path) -> None:
    spec, container = daemon_of(helm4, "nonRoot=true")
    context = spec["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 65532)
    assert not [each for each in spec["volumes"] if "hostPath" in each]
    variables = chart.environment(container)
    assert variables["WARPWATCH_ATTRIBUTION__KUBELET_SOCKET"] == '"off"'
    # The mount point is the kubelet's, and the daemon serves no folder but its own.
    assert variables["WARPWATCH_DIR"] == "/run/warpwatch/pod"


def test_without_root_the_hosts_folders_must_be_there_already(helm4: Path) -> None:
    spec, container = daemon_of(helm4, "nonRoot=true", "nonRootUser.sharedFolders=true")
    assert chart.environment(container)["WARPWATCH_DIR"] == "/run/warpwatch"
    found = {
        each["hostPath"]["path"]: each["hostPath"]["type"]
        for each in spec["volumes"]
        if "hostPath" in each
    }
    assert found == {"/run/warpwatch": "Directory", "/var/lib/warpwatch": "Directory"}


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("hostPID", {"hostPID": True}),
        ("hostNetwork", {"hostNetwork": True}),
        ("kernelLog", {"privileged": True}),
        ("profiling", {"add": ["SYS_ADMIN"]}),
        ("migMonitor", {"add": ["SYS_ADMIN"]}),
    ],
)
def test_each_named_value_gives_what_it_says_and_no_more(
    helm4: Path, value: str, given: dict[str, object]
) -> None:
    spec, container = daemon_of(helm4, f"privileges.{value}=true")
    context = container["securityContext"]
    capabilities = context.get("capabilities", {})
    places = ((spec, ("hostPID", "hostNetwork")), (context, ("privileged",)))
    found = {key: place[key] for place, keys in places for key in keys if key in place}
    found |= {key: value for key, value in capabilities.items() if key == "add"}
    assert found == given
    assert context["readOnlyRootFilesystem"] is True


def test_probes_have_a_port_of_their_own_whatever_the_api_demands(helm4: Path) -> None:
    for more in ("", "tls.clientAuth=true,tls.existingSecret=tls", "webConfig.existingSecret=web"):
        _, container = daemon_of(helm4, *filter(None, more.split(",")))
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"] == {"path": "/healthz", "port": "probes"}
        assert {"name": "probes", "containerPort": 9401, "protocol": "TCP"} in container["ports"]
        assert chart.environment(container)["WARPWATCH_HTTP__PROBE_LISTEN"] == "10.0.0.1:9401"


def test_readiness_is_not_whether_the_gpus_can_be_read(helm4: Path) -> None:
    """Such a node would hold up every rollout, and its daemon says itself what is wrong."""
    _, container = daemon_of(helm4)
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_a_policy_lets_everybody_in_on_the_port_alone(helm4: Path) -> None:
    policy = chart.only(chart.render(helm4, "--set", "port=9500"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    ports = [{"port": 9500, "protocol": "TCP"}, {"port": 9401, "protocol": "TCP"}]
    assert policy["ingress"] == [{"ports": ports}]
    assert "egress" not in policy


def test_a_policy_can_name_who_comes_in_and_where_the_daemon_goes(helm4: Path) -> None:
    objects = chart.scenario(helm4, "network-policy-values.yaml")
    policy = chart.only(objects, "NetworkPolicy")["spec"]
    (rule,) = policy["ingress"]
    assert [each["port"] for each in rule["ports"]] == [9400, 9401]
    prometheus, ours = rule["from"]
    assert sorted(prometheus) == ["namespaceSelector"]
    # The fleet, and the release's test.
    selected = ours["podSelector"]["matchLabels"].items()
    pods = [chart.only(objects, "DaemonSet")["spec"]["template"], chart.only(objects, "Pod")]
    assert all(selected <= pod["metadata"]["labels"].items() for pod in pods)
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    dns, grafana = policy["egress"]
    assert [each["port"] for each in dns["ports"]] == [53, 53]
    assert grafana["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]


@pytest.mark.parametrize(
    "value", ["networkPolicy.enabled=false", "privileges.hostNetwork=true", "mode=sidecar"]
)
def test_there_is_no_policy_where_it_would_do_nothing(helm4: Path, value: str) -> None:
    assert chart.of_kind(chart.render(helm4, "--set", value), "NetworkPolicy") == []


def test_a_type_for_selinux_is_the_pods(helm4: Path) -> None:
    spec, _ = daemon_of(helm4, "seLinuxOptions.type=spc_t")
    assert spec["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}


def test_a_command_in_the_pod_finds_the_daemon_by_its_socket(helm4: Path) -> None:
    """`kubectl exec POD -- warpwatch status`: no training mounts the folder of the socket."""
    spec, container = daemon_of(helm4)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/run/warpwatch-api"]]["emptyDir"]["medium"] == "Memory"
    assert "WARPWATCH_URL" not in chart.environment(container)
