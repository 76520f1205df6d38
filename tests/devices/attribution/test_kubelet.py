"""The kubelet is asked over its socket, in every form of answer, away and back."""

from __future__ import annotations

import socket as unix
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.devices.attribution.fake_kubelet import FakeKubelet, add_pod, pods
from tests.devices.attribution.gpus import GPU_0, GPU_1, MIG_3, MIG_7, node
from warpwatch_devices.attribution import podresources_client
from warpwatch_devices.attribution import podresources_pb2 as pb
from warpwatch_devices.attribution.kubelet import MAX_HOLDERS, MAX_REFUSED, KubeletOrigin
from warpwatch_devices.attribution.origin import OriginAnswer, OriginError
from warpwatch_telemetry.attribution import Workload


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


@pytest.fixture
def kubelet(socket: Path) -> Iterator[FakeKubelet]:
    server = FakeKubelet(socket)
    yield server
    server.stop()


@pytest.fixture
def origin(socket: Path) -> Iterator[KubeletOrigin]:
    asked = KubeletOrigin(socket, optional=True)
    yield asked
    asked.close()


def held(answer: OriginAnswer) -> dict[str, list[str]]:
    """Pods by device."""
    (attribution,) = answer.attributions
    return {
        uuid: [workload.pod for workload in workloads]
        for uuid, workloads in attribution.workloads.items()
    }


def test_containers_of_all_kinds_hold_devices_by_all_kinds_of_ids(
    kubelet: FakeKubelet, origin: KubeletOrigin
) -> None:
    response = pods(
        ("whole", "nvidia.com/gpu", GPU_0),
        ("instance", "nvidia.com/mig-3g.40gb", MIG_3),
        ("old-instance", "nvidia.com/mig-1g.10gb", f"MIG-{GPU_1}/7/0"),
        ("renamed", "example.com/our-gpu", GPU_1),
        ("network", "rdma/hca", "mlx5_0"),
    )
    container = add_pod(response, "many", namespace="team-a", container="sidecar")
    container.cpu_ids.extend([0, 1])
    claim = container.dynamic_resources.add(claim_name="gpus", claim_namespace="team-a")
    claimed = claim.claim_resources.add(
        driver_name="gpu.nvidia.com", pool_name="node-1", device_name="gpu-1-mig-1g10gb-19-0"
    )
    claimed.cdi_devices.add(name="k8s.gpu.nvidia.com/device=gpu-1-mig-1g10gb-19-0")
    kubelet.response = response
    reading = origin.read(node(), 1000.0)
    assert held(reading) == {
        GPU_0: ["whole"],
        MIG_3: ["instance"],
        MIG_7: ["old-instance", "many"],
        GPU_1: ["renamed"],
    }
    (attribution,) = reading.attributions
    assert (attribution.origin, attribution.time) == ("kubelet", 1000.0)
    assert attribution.workloads[MIG_7][1] == Workload("team-a", "many", "sidecar")
    assert reading.refused == frozenset()


@pytest.mark.parametrize(
    ("resource", "ids"),
    [
        ("nvidia.com/gpu", (f"{GPU_0}::0", f"{GPU_0}::1")),
        ("nvidia.com/gpu.shared", (GPU_0, GPU_0)),
        ("nvidia.com/gpu", ("nvidia0/vgpu0", "nvidia0/vgpu1")),
    ],
)
def test_pods_that_share_a_device_are_all_named(
    kubelet: FakeKubelet, origin: KubeletOrigin, resource: str, ids: tuple[str, str]
) -> None:
    kubelet.response = pods(("a", resource, ids[0]))
    origin.read(node(), 1000.0)
    kubelet.response = pods(("a", resource, ids[0]), ("b", resource, ids[1]))
    assert held(origin.read(node(), 1010.0)) == {GPU_0: ["a", "b"]}


def test_a_claim_by_its_cdi_name_alone(kubelet: FakeKubelet, origin: KubeletOrigin) -> None:
    response = pb.ListPodResourcesResponse()
    claim = add_pod(response, "claimant").dynamic_resources.add(claim_name="gpu")
    by_uuid = claim.claim_resources.add(driver_name="gpu.nvidia.com", device_name="gpu-0")
    by_uuid.cdi_devices.add(name=f"nvidia.com/gpu={GPU_1}")
    other = claim.claim_resources.add(driver_name="gpu.example.com", device_name="gpu-0")
    other.cdi_devices.add(name="nvidia.com/gpu=0")
    claim.claim_resources.add(driver_name="compute-domain.nvidia.com", device_name="channel-0")
    kubelet.response = response
    reading = origin.read(node(), 1000.0)
    assert held(reading) == {GPU_1: ["claimant"], GPU_0: ["claimant"]}
    assert reading.refused == frozenset()


def test_the_newest_pod_holds_a_whole_device_that_an_ended_one_is_still_listed_with(
    kubelet: FakeKubelet, origin: KubeletOrigin
) -> None:
    ended, running = ("z-ended", "nvidia.com/gpu", GPU_0), ("a-new", "nvidia.com/gpu", GPU_0)
    kubelet.response = pods(ended)
    assert held(origin.read(node(), 1000.0)) == {GPU_0: ["z-ended"]}
    kubelet.response = pods(ended, running)
    assert held(origin.read(node(), 1010.0)) == {GPU_0: ["a-new"]}
    assert held(origin.read(node(), 1020.0)) == {GPU_0: ["a-new"]}
    kubelet.response = pods()
    assert held(origin.read(node(), 1030.0)) == {}


def test_pods_that_cannot_be_kept_apart_are_both_kept(
    kubelet: FakeKubelet, origin: KubeletOrigin
) -> None:
    kubelet.response = pods(("a", "nvidia.com/gpu", GPU_0), ("b", "nvidia.com/gpu", GPU_0))
    assert held(origin.read(node(), 1000.0)) == {GPU_0: ["a", "b"]}


def test_containers_of_one_pod_are_all_kept(kubelet: FakeKubelet, origin: KubeletOrigin) -> None:
    kubelet.response = pods(("train", "nvidia.com/gpu", GPU_0))
    origin.read(node(), 1000.0)
    sidecar = kubelet.response.pod_resources[0].containers.add(name="sidecar")
    sidecar.devices.add(resource_name="nvidia.com/gpu", device_ids=[GPU_0])
    (attribution,) = origin.read(node(), 1010.0).attributions
    names = [workload.container for workload in attribution.workloads[GPU_0]]
    assert names == ["main", "sidecar"]


def test_ids_that_lead_nowhere_are_named_and_cost_nothing_else(
    kubelet: FakeKubelet, origin: KubeletOrigin
) -> None:
    kubelet.response = pods(
        ("good", "nvidia.com/gpu", GPU_0),
        ("virtual", "nvidia.com/gpu", f"{GPU_0}-3"),
        ("absent", "nvidia.com/gpu", "nvidia9"),
        ("p" * 5000, "nvidia.com/gpu", GPU_1),
        ("long", "nvidia.com/gpu", "x" * 100_000),
    )
    reading = origin.read(node(), 1000.0)
    assert held(reading) == {GPU_0: ["good"]}
    assert reading.refused == {f"{GPU_0}-3", "nvidia9", GPU_1, "x" * 100}


def test_a_node_without_a_kubelet_has_nothing_to_say(origin: KubeletOrigin) -> None:
    assert origin.read(node(), 1000.0) == OriginAnswer()


def test_a_socket_that_was_asked_for_must_be_there(socket: Path) -> None:
    with pytest.raises(OriginError, match="No such file"):
        KubeletOrigin(socket, optional=False).read(node(), 1000.0)
    socket.write_text("")
    with pytest.raises(OriginError, match="is no socket"):
        KubeletOrigin(socket, optional=False).read(node(), 1000.0)


def test_the_connection_is_kept(kubelet: FakeKubelet, origin: KubeletOrigin) -> None:
    for _ in range(3):
        origin.read(node(), 1000.0)
    assert (kubelet.calls, len(kubelet.peers)) == (3, 1)


def test_a_kubelet_that_comes_goes_and_comes_back_is_asked_again(
    socket: Path, origin: KubeletOrigin
) -> None:
    assert origin.read(node(), 1000.0) == OriginAnswer()
    first = FakeKubelet(socket, pods(("before", "nvidia.com/gpu", GPU_0)))
    assert held(origin.read(node(), 1010.0)) == {GPU_0: ["before"]}
    first.stop()
    for _ in range(2):
        with pytest.raises(OriginError):
            origin.read(node(), 1020.0)
    second = FakeKubelet(socket, pods(("after", "nvidia.com/gpu", GPU_0)))
    assert held(origin.read(node(), 1030.0)) == {GPU_0: ["after"]}
    second.stop()


def test_a_new_socket_under_the_same_name_is_the_one_that_is_asked(
    tmp_path: Path, socket: Path, origin: KubeletOrigin
) -> None:
    first = FakeKubelet(socket, pods(("before", "nvidia.com/gpu", GPU_0)))
    origin.read(node(), 1000.0)
    second = FakeKubelet(tmp_path / "new.sock", pods(("after", "nvidia.com/gpu", GPU_0)))
    # As the kubelet does it; the first one has not ended yet.
    (tmp_path / "new.sock").rename(socket)
    assert held(origin.read(node(), 1010.0)) == {GPU_0: ["after"]}
    first.stop()
    second.stop()


def test_a_kubelet_that_has_no_pods_yet_after_its_start_is_not_believed(
    socket: Path, origin: KubeletOrigin
) -> None:
    training = pods(("train", "nvidia.com/gpu", GPU_0))
    first = FakeKubelet(socket, training)
    assert held(origin.read(node(), 1010.0)) == {GPU_0: ["train"]}
    first.stop()
    second = FakeKubelet(socket)
    # Static pods come from files and are there at once.
    add_pod(second.response, "kube-proxy")
    for _ in range(2):
        with pytest.raises(OriginError, match="no devices are listed yet"):
            origin.read(node(), 1020.0)
    second.response = training
    assert held(origin.read(node(), 1030.0)) == {GPU_0: ["train"]}
    second.response = pods()
    assert held(origin.read(node(), 1040.0)) == {}
    second.stop()


def test_devices_that_a_new_kubelet_lists_no_more_are_given_up_in_time(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podresources_client, "STARTING_S", 0.0)
    origin = KubeletOrigin(socket)
    first = FakeKubelet(socket, pods(("train", "nvidia.com/gpu", GPU_0)))
    assert held(origin.read(node(), 1000.0)) == {GPU_0: ["train"]}
    first.stop()
    second = FakeKubelet(socket)
    assert held(origin.read(node(), 1010.0)) == {}
    origin.close()
    second.stop()


def test_a_failure_says_why_behind_the_socket_s_name(tmp_path: Path) -> None:
    left = tmp_path / ("n" * 30) / "kubelet.sock"
    left.parent.mkdir()
    with unix.socket(unix.AF_UNIX) as server:
        server.bind(str(left))
    with pytest.raises(OriginError, match="Connection refused"):
        KubeletOrigin(left).read(node(), 1000.0)


def test_no_answer_in_time_is_a_failure(
    kubelet: FakeKubelet, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podresources_client, "DEADLINE_S", 0.2)
    kubelet.answering.clear()
    with pytest.raises(OriginError, match="DEADLINE_EXCEEDED"):
        KubeletOrigin(socket).read(node(), 1000.0)


def test_an_answer_without_end_is_a_failure(kubelet: FakeKubelet, origin: KubeletOrigin) -> None:
    kubelet.response = pods(("a", "nvidia.com/gpu", "x" * 17 * 2**20))
    with pytest.raises(OriginError, match="RESOURCE_EXHAUSTED"):
        origin.read(node(), 1000.0)
    kubelet.response = pods(("a", "nvidia.com/gpu", GPU_0))
    devices = kubelet.response.pod_resources[0].containers[0].devices[0]
    devices.device_ids.extend(["1"] * podresources_client.MAX_LISTED)
    with pytest.raises(OriginError, match="more than 65536 devices"):
        origin.read(node(), 1000.0)


def test_absurdly_many_pods_and_ids_are_cut_short(
    kubelet: FakeKubelet, origin: KubeletOrigin
) -> None:
    sharers = [(f"pod-{n}", "nvidia.com/gpu", f"{GPU_0}::{n}") for n in range(2000)]
    unknown = [(f"pod-{n}", "nvidia.com/gpu", f"unknown-{n}") for n in range(2000)]
    kubelet.response = pods(*sharers, *unknown)
    reading = origin.read(node(), 1000.0)
    assert len(held(reading)[GPU_0]) == MAX_HOLDERS
    assert len(reading.refused) == MAX_REFUSED


def test_fields_of_newer_kubelets_are_skipped(kubelet: FakeKubelet, origin: KubeletOrigin) -> None:
    newer = pods(("a", "nvidia.com/gpu", GPU_0)).SerializeToString() + b"\xfa\x07\x03new"
    kubelet.response = pb.ListPodResourcesResponse.FromString(newer)
    assert held(origin.read(node(), 1000.0)) == {GPU_0: ["a"]}


def test_grpc_is_not_imported_without_a_kubelet(socket: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from warpwatch_devices.attribution.source import AttributionSource\n"
        "from warpwatch_devices.attribution.kubelet import KubeletOrigin\n"
        "KubeletOrigin(Path(sys.argv[1])).read((), 0.0)\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'grpc', 'google'})"
    )
    command = [sys.executable, "-c", code, str(socket)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_generated_file_is_that_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    package = Path(podresources_client.__file__).parent
    root = package.parents[1]
    proto = package / "podresources.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(root)]
    subprocess.run([*command, f"--python_out={tmp_path}", str(proto)], check=True)
    generated = tmp_path / "warpwatch_devices/attribution/podresources_pb2.py"
    assert generated.read_text() == (package / "podresources_pb2.py").read_text()
