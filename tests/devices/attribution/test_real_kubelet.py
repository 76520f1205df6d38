"""A real kubelet tells which container holds which device, goes away, and comes back.

Runs where WARPWATCH_TEST_KUBELET names a folder with the binaries `kubelet` and `kube-apiserver`
of Kubernetes 1.20. Also needed: root, cgroup version 1, etcd, containerd with runc and ctr,
openssl, and a C compiler that links statically. No image is pulled, and only loopback is
used. The test takes a minute, in which the machine is a node: kernel settings that a kubelet
changes, mounts, control groups and folders are put back afterwards. It refuses to run where
/var/lib/kubelet has anything in it, as on a node of a cluster.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.devices.attribution.gpus import GPU_0, GPU_1, sample
from tests.devices.attribution.kubernetes_node import KUBELET_FOLDER, DevicePlugin, KubernetesNode
from tests.waiting import eventually
from warpwatch_devices.attribution.control_groups import read_owner
from warpwatch_devices.attribution.kubelet import KubeletOrigin
from warpwatch_devices.source import OriginError
from warpwatch_telemetry.samples import ProcessOwner

# Read here: every test runs without the variables of the project.
BINARIES = os.environ.get("WARPWATCH_TEST_KUBELET", "")
RESOURCE = "nvidia.com/gpu"

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(not BINARIES, reason="WARPWATCH_TEST_KUBELET is not set"),
]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[KubernetesNode]:
    """With two GPUs that a device plugin offers."""
    if any(KUBELET_FOLDER.glob("*")):
        pytest.fail(f"{KUBELET_FOLDER} is in use")
    if not Path("/sys/fs/cgroup/memory").is_dir():
        pytest.fail("Kubernetes 1.20 needs cgroup version 1")
    # Not the usual folder for tests: containerd needs a file system that overlays can lie on.
    work = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="warpwatch-node-"))
    running = KubernetesNode(Path(BINARIES), work, logs=tmp_path)
    plugin = DevicePlugin(tmp_path, RESOURCE, [GPU_0, GPU_1])
    try:
        running.start()
        plugin.start()
        eventually(lambda: running.api.allocatable(RESOURCE) == 2)
        yield running
    finally:
        plugin.stop()
        running.stop()
        shutil.rmtree(work)


def holders(origin: KubeletOrigin) -> dict[str, str] | str:
    """The pod of each device, or why the kubelet does not tell."""
    try:
        answer = origin.read((sample(GPU_0, 0), sample(GPU_1, 1)), 1.0)
    except OriginError as error:
        return str(error)
    for attribution in answer.attributions:
        held = attribution.workloads.items()
        return {uuid: f"{by[0].namespace}/{by[0].pod}" for uuid, by in held}
    return "there is no kubelet yet"


def run_pod(node: KubernetesNode, namespace: str, name: str, gpus: int) -> tuple[int, set[str]]:
    """The process of a pod that runs, and the devices that the kubelet chose for it."""
    uid = node.api.create_pod(namespace, name, {RESOURCE: str(gpus)})
    eventually(lambda: node.api.phase(namespace, name) == "Running")
    container = node.api.container_id(namespace, name)
    pid = node.pid_of(container)
    assert read_owner(pid, "python") == ProcessOwner("python", uid, container)
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    variables = dict(line.split("=", 1) for line in environment if line)
    return pid, set(variables["NVIDIA_VISIBLE_DEVICES"].split(","))


def test_devices_follow_containers_while_pods_and_kubelet_come_and_go(node: KubernetesNode) -> None:
    origin = KubeletOrigin()
    eventually(lambda: holders(origin) == {})
    node.api.create_namespace("team-a")
    _, (device_0,) = run_pod(node, "default", "train-0", gpus=1)
    _, (device_1,) = run_pod(node, "team-a", "train-1", gpus=1)
    both = {device_0: "default/train-0", device_1: "team-a/train-1"}
    eventually(lambda: holders(origin) == both)
    node.api.delete_pod("default", "train-0")
    eventually(lambda: holders(origin) == {device_1: "team-a/train-1"})
    node.api.delete_pod("team-a", "train-1")
    # A pod that ended leaves its devices to the next.
    pid, _ = run_pod(node, "default", "train-2", gpus=2)
    eventually(lambda: holders(origin) == dict.fromkeys((GPU_0, GPU_1), "default/train-2"))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: node.api.phase("default", "train-2") == "Failed")
    pid, _ = run_pod(node, "default", "train-3", gpus=2)
    held = dict.fromkeys((GPU_0, GPU_1), "default/train-3")
    eventually(lambda: holders(origin) == held)
    node.stop_kubelet()
    eventually(lambda: "Connection refused" in holders(origin))
    assert Path(f"/proc/{pid}").exists(), "the container goes on"
    # A new kubelet lists no pods before it has them from the API server: that is not their end.
    with node.api_held():
        node.start_kubelet()
        eventually(lambda: "started again" in holders(origin))
    eventually(lambda: holders(origin) == held)
    node.api.delete_pod("default", "train-3")
    eventually(lambda: holders(origin) == {})
    origin.close()
