"""A real kubelet tells which container holds which device, goes away, and comes back.

Runs where WARPWATCH_TEST_KUBELET names a folder with the binaries `kubelet` and `kube-apiserver`
of Kubernetes 1.20. Also needed: root, cgroup version 1, etcd, containerd with runc and ctr,
openssl, and a C compiler that links statically; no image is pulled and nothing but loopback is
used. The tests take a minute, in which the machine is a node: kernel settings that a kubelet
changes, mounts, control groups and folders are put back afterwards. They refuse to run where
/var/lib/kubelet has anything in it, as on a node of a cluster.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.state.counted import counted
from tests.devices.attribution.device_plugin import DevicePlugin
from tests.devices.attribution.gpus import GPU_0, GPU_1, sample
from tests.devices.attribution.kubernetes_node import KubernetesNode
from tests.devices.attribution.node_traces import KUBELET_FOLDER
from tests.devices.recording import wait_until
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_daemon.state.hub import Hub
from warpwatch_devices.attribution.source import AttributionSource
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.source import Surroundings
from warpwatch_telemetry.attribution import Attribution, ProcessOwner, Workload
from warpwatch_telemetry.samples import DeviceSample, SourceHealth

# Read here: every test runs without the variables of the project.
BINARIES = os.environ.get("WARPWATCH_TEST_KUBELET", "")
RESOURCE = "nvidia.com/gpu"
# For whatever a node does by itself; it takes seconds.
NODE_S = 120.0

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(not BINARIES, reason="WARPWATCH_TEST_KUBELET is not set"),
]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesNode]:
    """With two GPUs that a device plugin offers."""
    for name in ("INTERVAL_S", "TICK_S"):
        monkeypatch.setattr(f"warpwatch_devices.attribution.source.{name}", 0.1)
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
        wait_until(lambda: running.api.allocatable(RESOURCE) == 2, NODE_S)
        yield running
    finally:
        plugin.stop()
        running.stop()
        shutil.rmtree(work)


class RecordingHub(Hub):
    def __init__(self) -> None:
        super().__init__(4.0)
        self.reported: list[Attribution] = []

    def publish_attribution(self, attribution: Attribution) -> None:
        super().publish_attribution(attribution)
        self.reported.append(attribution)


class Watch:
    """The daemon's own loops that ask the kubelet, and what the daemon would show."""

    def __init__(self) -> None:
        self.devices: tuple[DeviceSample, ...] = (sample(GPU_0, 0), sample(GPU_1, 1))
        self._hub = RecordingHub()
        self._supervisor = Supervisor()
        surroundings = Surroundings(
            load_of=lambda index: None,
            devices=lambda: self.devices,
            counters_wanted=lambda: False,
            fail=lambda reason: None,
        )
        self._source = AttributionSource(AttributionConfig(), surroundings)
        self._source.start(self._supervisor, self._hub)

    def of(self, origin: str) -> Attribution | None:
        reported = {
            attribution.origin: attribution for attribution in self._hub.state().attributions
        }
        return reported.get(origin)

    def holders(self) -> dict[str, tuple[Workload, ...]] | None:
        """By UUID; None before the kubelet has answered."""
        reported = self.of("kubelet")
        return None if reported is None else dict(reported.workloads)

    def answers_since(self, time_s: float) -> list[dict[str, tuple[Workload, ...]]]:
        """What was published of the kubelet from then on, without repetitions."""
        answers = [
            dict(reported.workloads)
            for reported in self._hub.reported
            if reported.origin == "kubelet" and reported.time >= time_s
        ]
        return [answer for answer, _ in itertools.groupby(answers)]

    def owners(self) -> dict[int, ProcessOwner]:
        reported = self.of("cgroup")
        return {} if reported is None else dict(reported.processes)

    def health(self) -> SourceHealth:
        (health,) = self._hub.health()
        return health

    def errors(self) -> float:
        return counted(self._hub, "attribution_errors_total", "kubelet") or 0.0

    def close(self) -> None:
        self._supervisor.stop()
        self._source.close()


@pytest.fixture
def watch() -> Iterator[Watch]:
    watching = Watch()
    yield watching
    watching.close()


def run_pod(node: KubernetesNode, namespace: str, name: str, gpus: int) -> ProcessOwner:
    """What control groups must say of its processes, which run when this returns."""
    uid = node.api.create_pod(namespace, name, {RESOURCE: str(gpus)})
    wait_until(lambda: node.api.phase(namespace, name) == "Running", NODE_S)
    return ProcessOwner("python", uid, node.api.container_id(namespace, name))


def devices_given_to(pid: int) -> list[str]:
    """What the device plugin had the container use when the kubelet chose its devices."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    variables = dict(line.split("=", 1) for line in environment if line)
    return variables["NVIDIA_VISIBLE_DEVICES"].split(",")


def test_each_device_is_its_containers_until_the_pod_is_deleted(
    node: KubernetesNode, watch: Watch
) -> None:
    wait_until(lambda: watch.holders() == {}, NODE_S)
    node.api.create_namespace("team-a")
    first = run_pod(node, "default", "train-0", gpus=1)
    second = run_pod(node, "team-a", "train-1", gpus=1)
    pids = node.pid_of(first.container_id), node.pid_of(second.container_id)
    (device_0,), (device_1,) = devices_given_to(pids[0]), devices_given_to(pids[1])
    assert {device_0, device_1} == {GPU_0, GPU_1}
    holders = {
        device_0: (Workload("default", "train-0", "main"),),
        device_1: (Workload("team-a", "train-1", "main"),),
    }
    wait_until(lambda: watch.holders() == holders)
    watch.devices = (sample(GPU_0, 0, *pids), sample(GPU_1, 1))
    wait_until(lambda: watch.owners() == {pids[0]: first, pids[1]: second})
    node.api.delete_pod("default", "train-0")
    del holders[device_0]
    wait_until(lambda: watch.holders() == holders, NODE_S)
    assert (watch.health().up, watch.errors()) == (True, 0)


def test_a_pod_that_ended_leaves_its_devices_to_the_next(
    node: KubernetesNode, watch: Watch
) -> None:
    first = run_pod(node, "default", "train-0", gpus=2)
    trainer = (Workload("default", "train-0", "main"),)
    wait_until(lambda: watch.holders() == {GPU_0: trainer, GPU_1: trainer})
    os.kill(node.pid_of(first.container_id), signal.SIGKILL)
    wait_until(lambda: node.api.phase("default", "train-0") == "Failed", NODE_S)
    run_pod(node, "default", "train-1", gpus=2)
    trainer = (Workload("default", "train-1", "main"),)
    wait_until(lambda: watch.holders() == {GPU_0: trainer, GPU_1: trainer})


def test_the_last_answer_stays_while_the_kubelet_is_away(
    node: KubernetesNode, watch: Watch
) -> None:
    owner = run_pod(node, "default", "train-0", gpus=2)
    trainer = (Workload("default", "train-0", "main"),)
    holders = {GPU_0: trainer, GPU_1: trainer}
    wait_until(lambda: watch.holders() == holders)
    node.stop_kubelet()
    wait_until(lambda: watch.errors() >= 1)
    last = watch.of("kubelet")
    assert last is not None and last.workloads == holders
    wait_until(lambda: watch.errors() >= 10)
    assert watch.of("kubelet") == last
    assert not watch.health().up
    assert watch.health().reason.startswith("kubelet: UNAVAILABLE")
    assert watch.health().reason.endswith("Connection refused")
    assert devices_given_to(node.pid_of(owner.container_id)), "the container goes on"
    # A new kubelet lists no pods before it has them from the API server: that is not their end.
    with node.api_held():
        node.start_kubelet()
        wait_until(lambda: "started again" in watch.health().reason, NODE_S)
    wait_until(lambda: watch.health().up, NODE_S)
    assert watch.answers_since(last.time) == [holders]
    node.api.delete_pod("default", "train-0")
    wait_until(lambda: watch.holders() == {}, NODE_S)
