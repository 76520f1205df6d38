"""The chart on a real API server, and its DaemonSet on a real kubelet with its pod-resources.

Runs where WARPWATCH_TEST_KUBELET names a folder with kube-apiserver, kube-controller-manager,
kube-scheduler and kubelet of Kubernetes 1.20; also needed is what tests/image and
tests/devices/attribution/test_real_kubelet.py need. Takes some minutes, in which the machine is
a node.
"""

import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.devices.attribution.kubernetes_node import KUBELET_FOLDER, DevicePlugin
from tests.helm import chart
from tests.helm.cluster import NAMESPACE, Client, Cluster
from tests.image import containers
from tests.waiting import eventually
from warpwatch_devices.simulated import simulated_uuid

# Read here: every test runs without the variables of the project.
BINARIES = os.environ.get("WARPWATCH_TEST_KUBELET", "")
RESOURCE = "nvidia.com/gpu"
PORT = 19400

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(not BINARIES, reason="WARPWATCH_TEST_KUBELET is not set"),
]


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    """Not the usual folder for tests: containerd needs a file system that overlays can lie on."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="warpwatch-cluster-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if any(KUBELET_FOLDER.glob("*")):
        pytest.fail(f"{KUBELET_FOLDER} is in use")
    running = Cluster(Path(BINARIES), work, logs=tmp_path_factory.mktemp("logs"))
    try:
        running.start()
        running.api.create_namespace(NAMESPACE)
        yield running
    finally:
        running.stop()


@pytest.fixture(params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Client:
    return Client(request.getfixturevalue(request.param), cluster.kubeconfig, tmp_path)


@pytest.fixture
def kube(kubectl: Path, cluster: Cluster, tmp_path: Path) -> Client:
    return Client(kubectl, cluster.kubeconfig, tmp_path)


@pytest.fixture
def any_version(tmp_path: Path) -> str:
    """The chart without ``kubeVersion``: binaries that one has built may call themselves v0.0.0."""
    copy = tmp_path / "warpwatch"
    shutil.copytree(chart.CHART, copy)
    about = yaml.safe_load((copy / "Chart.yaml").read_text())
    del about["kubeVersion"]
    (copy / "Chart.yaml").write_text(yaml.safe_dump(about))
    return str(copy)


def test_install_upgrade_rollback_uninstall(helm, kube, any_version):
    path = any_version
    # No node has GPUs here, so nothing starts.
    helm("install", "warpwatch", path, "--set", "token.create=true")
    token = kube.get("secret", "warpwatch-token")["data"]["token"]
    helm("upgrade", "warpwatch", path, "--set", "token.create=true", "--set", "port=9500")
    assert kube.get("service", "warpwatch-peers")["spec"]["ports"][0]["port"] == 9500
    # Made once, for all upgrades.
    assert kube.get("secret", "warpwatch-token")["data"]["token"] == token
    helm("upgrade", "warpwatch", path, "--set", "nonRoot=true")
    helm("rollback", "warpwatch", "1")
    daemon_set = kube.get("daemonset", "warpwatch")
    assert daemon_set["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 0
    assert kube.get("service", "warpwatch-peers")["spec"]["ports"][0]["port"] == 9400
    helm("uninstall", "warpwatch")
    kinds = "daemonsets,services,configmaps,serviceaccounts,secrets"
    left = kube.get(kinds, "--selector=app.kubernetes.io/instance=warpwatch")["items"]
    assert left == []


@pytest.fixture
def gpus(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """The kubelet gives out GPUs that the daemon simulates."""
    plugin = DevicePlugin(tmp_path, RESOURCE, [simulated_uuid(0), simulated_uuid(1)])
    plugin.start()
    try:
        eventually(lambda: cluster.api.allocatable(RESOURCE) == 2, "the GPUs are allocatable")
        yield
    finally:
        plugin.stop()


@pytest.fixture
def values(cluster: Cluster, work: Path) -> Path:
    """The values of a release with simulated GPUs on a node without a network for pods."""
    containers.make_base()
    containers.build()
    archive = work / "image.tar"
    archive.unlink(missing_ok=True)
    save = ("podman", "save", "--quiet", "--output", str(archive), containers.IMAGE)
    containers.call(*save, timeout_s=300)
    cluster.load(archive)
    tree: dict[str, Any] = {
        "image": {
            "registry": "", "repository": containers.IMAGE, "tag": "latest", "pullPolicy": "Never",
        },
        "port": PORT,
        "gpuNodesOnly": False,
        # Without a network for pods the node is not ready.
        "tolerations": [{"operator": "Exists"}],
        "privileges": {"hostNetwork": True},
        "hostPaths": {"run": f"{work}/run", "data": f"{work}/data"},
        "config": {"sources": {"simulated": {"enabled": True}}},
    }  # fmt: skip
    file = work / "values.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def metrics(pod: Any) -> str:
    address = pod["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:{PORT}/metrics", timeout=120) as page:
        return str(page.read().decode())


def test_a_real_kubelet_runs_it_and_tells_it_whose_the_gpus_are(
    cluster, kube, helm4, gpus, values, any_version
):
    helm = Client(helm4, cluster.kubeconfig, values.parent)
    release = ("warpwatch", any_version, "--values", str(values))
    helm("install", *release)
    pod = kube.wait_for_pod()
    cluster.api.create_pod("default", "train-0", {RESOURCE: "1"})
    owner = 'container="main",namespace="default",pod="train-0"'

    def told() -> bool:
        lines = [line for line in metrics(pod).splitlines() if "device_workload_info{" in line]
        return any(all(part in line for part in owner.split(",")) for line in lines)

    eventually(told, "the daemon tells whose the GPU is")
    # A change of `triggers` alone: the kubelet exchanges the file, and the daemon takes it up.
    helm("upgrade", *release, "--set", "config.triggers.captures_per_hour=2")
    reloaded = 'config_reloads_total{result="ok"} 1'
    eventually(lambda: reloaded in metrics(pod), "the file is reloaded")
    same = kube.wait_for_pod()
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0
    # Any other: another pod.
    helm("upgrade", *release, "--set", "config.store.max_captures=10")
    old = pod["metadata"]["uid"]
    eventually(lambda: kube.wait_for_pod()["metadata"]["uid"] != old, "there is another pod")
    helm("uninstall", "warpwatch")
    cluster.api.delete_pod("default", "train-0")
    label = "--selector=app.kubernetes.io/component=daemon"
    eventually(lambda: kube.get("pods", label)["items"] == [], "its pods are gone")
