"""What the containers may do, and which named value gives them more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm import chart

# The scenarios whose values ask for more on purpose.
PRIVILEGED = {"gke-values.yaml", "mig-values.yaml", "privileges-values.yaml"}
UNPRIVILEGED = [name for name in chart.SCENARIOS if name not in PRIVILEGED]


def daemon_of(helm: Path, *values: str) -> tuple[chart.Object, chart.Object]:
    """Pod and container of the daemon."""
    sets = [argument for value in values for argument in ("--set", value)]
    spec = chart.only(chart.render(helm, *sets), "DaemonSet")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize("name", UNPRIVILEGED)
def test_no_container_may_do_anything_special(helm4: Path, name: str) -> None:
    for spec in chart.pod_specs(chart.scenario(helm4, name)):
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(spec)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in chart.containers(spec):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_by_default_root_sees_three_folders_of_the_host(helm4: Path) -> None:
    spec, container = daemon_of(helm4)
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (0, 0)
    paths = {each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    assert paths == {"/run/warpwatch", "/var/lib/warpwatch", "/var/lib/kubelet/pod-resources"}
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    assert mounts["pod-resources"]["readOnly"] is True
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


def test_a_probe_looks_at_the_port_alone_where_it_cannot_get_in(helm4: Path) -> None:
    _, container = daemon_of(helm4)
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTP"
    _, container = daemon_of(helm4, "tls.existingSecret=tls")
    assert container["livenessProbe"]["httpGet"] == {
        "path": "/healthz",
        "port": "http",
        "scheme": "HTTPS",
    }
    for more in ("tls.clientAuth=true,tls.existingSecret=tls", "webConfig.existingSecret=web"):
        _, container = daemon_of(helm4, *more.split(","))
        assert container["livenessProbe"]["tcpSocket"] == {"port": "http"}


def test_readiness_is_not_whether_the_gpus_can_be_read(helm4: Path) -> None:
    """Such a node would hold up every rollout, and its daemon says itself what is wrong."""
    _, container = daemon_of(helm4)
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_a_policy_lets_in_on_the_port_alone(helm4: Path) -> None:
    policy = chart.only(chart.scenario(helm4, "network-policy-values.yaml"), "NetworkPolicy")
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": 9400, "protocol": "TCP"}]
    peers = [sorted(each) for each in rule["from"]]
    assert peers == [["namespaceSelector"], ["podSelector"]]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_a_type_for_selinux_is_the_pods(helm4: Path) -> None:
    spec, _ = daemon_of(helm4, "seLinuxOptions.type=spc_t")
    assert spec["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}


def test_a_command_in_the_pod_finds_the_daemon_and_knows_its_certificate(helm4: Path) -> None:
    """`kubectl exec POD -- warpwatch status`, where nothing but the password is missing."""

    def told(*values: str) -> list[str | None]:
        variables = chart.environment(daemon_of(helm4, *values)[1])
        names = ("WARPWATCH_URL", "WARPWATCH_CA_FILE", "WARPWATCH_SERVER_NAME")
        return [variables.get(name) for name in names]

    assert told() == ["http://10.0.0.1:9400", None, None]
    ours = ["https://10.0.0.1:9400", "/etc/warpwatch-web/ca.crt"]
    assert told("tls.existingSecret=tls") == [*ours, "warpwatch-peers.monitoring.svc"]
    named = told("tls.existingSecret=tls", "tls.serverName=gpu.example.com")
    assert named == [*ours, "gpu.example.com"]
    assert told("webConfig.existingSecret=web") == [None, None, None]
