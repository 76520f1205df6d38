"""The kubelet is asked over its socket, in every form of answer, away and back."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from tests.cases import cases
from tests.devices.attribution.fake_kubelet import FakeKubelet, add_pod, pods
from tests.devices.attribution.gpus import GPU_0, GPU_1, MIG_3, MIG_7, node
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch_devices.attribution import kubelet
from warpwatch_devices.attribution import podresources_pb2 as pb
from warpwatch_devices.attribution.kubelet import KubeletOrigin
from warpwatch_devices.source import OriginAnswer, OriginError

WHOLE = "nvidia.com/gpu"


class Node:
    """A socket, the kubelets behind it, and the origin that asks them."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "kubelet.sock"
        self.clock = ManualClock()
        self.origin = KubeletOrigin(self.socket, monotonic=self.clock.monotonic)
        self.kubelet: FakeKubelet

    def start(self, *held: tuple[str, str, str]) -> FakeKubelet:
        self.kubelet = FakeKubelet(self.socket, pods(*held))
        return self.kubelet

    def read(self, response: Any = None) -> OriginAnswer:
        if response is not None:
            self.kubelet.response = response
        return self.origin.read(node(), 1000.0)

    def held(self, *held: tuple[str, str, str], response: Any = None) -> dict[str, list[str]]:
        (attribution,) = self.read(response or (pods(*held) if held else None)).attributions
        return {uuid: [one.pod for one in by] for uuid, by in attribution.workloads.items()}


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(kubelet, "DEADLINE_S", DEADLINE_S)
    away = Node(tmp_path)
    yield away
    away.origin.close()


@pytest.fixture
def there(away: Node) -> Iterator[Node]:
    away.start()
    yield away
    away.kubelet.stop()


@pytest.mark.parametrize("case", cases(__file__).values(), ids=cases(__file__))
def test_the_containers_that_hold_each_device_are_those_listed(
    there: Node, case: dict[str, Any]
) -> None:
    text = json.dumps(case)
    for name, uuid in (("{0}", GPU_0), ("{1}", GPU_1), ("{3}", MIG_3), ("{7}", MIG_7)):
        text = text.replace(name, uuid)
    case = json.loads(text)
    response = ParseDict({"pod_resources": case["pods"]}, pb.ListPodResourcesResponse())
    # Fields of newer kubelets are skipped.
    newer = response.SerializeToString() + b"\xfa\x07\x03new"
    answer = there.read(pb.ListPodResourcesResponse.FromString(newer))
    (attribution,) = answer.attributions
    assert (attribution.origin, attribution.time) == ("kubelet", 1000.0)
    held = attribution.workloads.items()
    named = {uuid: [f"{w.namespace} {w.pod} {w.container}" for w in by] for uuid, by in held}
    assert named == case["said"]
    assert answer.refused == set(case.get("refused", ()))


@pytest.mark.parametrize(
    ("resource", "ids"),
    [
        (WHOLE, (f"{GPU_0}::0", f"{GPU_0}::1")),
        ("nvidia.com/gpu.shared", (GPU_0, GPU_0)),
        (WHOLE, ("nvidia0/vgpu0", "nvidia0/vgpu1")),
        (WHOLE, (GPU_0, f"{GPU_0}::1")),
    ],
)
def test_pods_sharing_a_device_are_named(there: Node, resource: str, ids: tuple[str, str]) -> None:
    there.held(("a", resource, ids[0]))
    assert there.held(("a", resource, ids[0]), ("b", resource, ids[1])) == {GPU_0: ["a", "b"]}


def test_the_newest_pod_holds_a_device_that_an_ended_one_is_listed_with(there: Node) -> None:
    ended, running = ("z-ended", WHOLE, GPU_0), ("a-new", WHOLE, GPU_0)
    assert there.held(ended) == {GPU_0: ["z-ended"]}
    for _ in range(2):
        assert there.held(ended, running) == {GPU_0: ["a-new"]}
    assert there.held(response=pods()) == {}
    # Holders that cannot be distinguished are both kept, and so are containers of one pod.
    assert there.held(ended, running) == {GPU_0: ["a-new", "z-ended"]}
    sidecar = there.kubelet.response.pod_resources[0].containers.add(name="sidecar")
    sidecar.devices.add(resource_name=WHOLE, device_ids=[GPU_0])
    (attribution,) = there.read().attributions
    holders = [(one.pod, one.container) for one in attribution.workloads[GPU_0]]
    assert holders == [("a-new", "main"), ("z-ended", "main"), ("z-ended", "sidecar")]


def test_a_socket_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "n" / "kubelet.sock"
    path.parent.mkdir()
    origin = KubeletOrigin(path, optional=False)
    with pytest.raises(OriginError, match="No such file"):
        origin.read(node(), 1000.0)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    with pytest.raises(OriginError, match="Connection refused"):
        origin.read(node(), 1000.0)
    path.unlink()
    path.write_text("")
    with pytest.raises(OriginError, match="is not a socket"):
        origin.read(node(), 1000.0)
    origin.close()


def test_a_kubelet_that_comes_goes_and_comes_back_is_asked_again(away: Node) -> None:
    # A node without a kubelet has nothing to say.
    assert away.read() == OriginAnswer()
    assert KubeletOrigin(Path(__file__, "kubelet.sock")).read(node(), 1.0) == OriginAnswer()
    first = away.start(("before", WHOLE, GPU_0))
    for _ in range(3):
        assert away.held() == {GPU_0: ["before"]}
    assert (first.calls, len(first.peers)) == (3, 1)
    first.stop()
    for _ in range(2):
        with pytest.raises(OriginError):
            away.read()
    second = away.start(("after", WHOLE, GPU_0))
    assert away.held() == {GPU_0: ["after"]}
    # A new socket under the same name, as the kubelet makes it, while this one has not ended.
    third = FakeKubelet(away.socket.with_name("new.sock"), pods(("last", WHOLE, GPU_0)))
    away.socket.with_name("new.sock").rename(away.socket)
    assert away.held() == {GPU_0: ["last"]}
    away.origin.close()
    assert getattr(away.origin._client, "_channel", "none") is None
    second.stop()
    third.stop()


def test_a_kubelet_without_pods_after_its_start_is_doubted_for_a_minute(away: Node) -> None:
    training = ("train", WHOLE, GPU_0)
    away.start()
    assert away.held() == {}
    away.held(training)
    for lists_it_again in (True, False):
        assert away.held() == {GPU_0: ["train"]}
        away.kubelet.stop()
        # Static pods come from files and are there at once.
        add_pod(away.start().response, "kube-proxy")
        for _ in range(2):
            with pytest.raises(OriginError, match="no devices are listed yet"):
                away.read()
            away.clock.advance(29.99)
        if lists_it_again:
            assert away.held(training) == {GPU_0: ["train"]}
            assert away.held(response=pods()) == {}
            away.held(training)
    away.clock.advance(0.03)
    assert away.held() == {}
    away.kubelet.stop()
    away.start()
    assert away.held() == {}
    away.kubelet.stop()


def test_what_is_long_or_late_fails_or_is_cut(there: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OriginError, match="RESOURCE_EXHAUSTED"):
        there.read(pods(("a", WHOLE, "x" * 17 * 2**20)))
    monkeypatch.setattr(kubelet, "MAX_HOLDERS", 5)
    monkeypatch.setattr(kubelet, "MAX_REFUSED", 7)
    monkeypatch.setattr(kubelet, "MAX_LISTED", 27)
    ids = [name for n in range(9) for name in (f"{GPU_0}::{n}", GPU_1, f"unknown-{n}")]
    refused = there.read(pods(("p" * 254, WHOLE, GPU_1), ("q", WHOLE, "x" * 101))).refused
    assert refused == {GPU_1, "x" * 100}
    many = [(f"pod-{n}", WHOLE, name) for n, name in enumerate(ids)]
    held = there.held(*many)
    assert {gpu: len(by) for gpu, by in held.items()} == {GPU_0: 5, GPU_1: 5}
    assert len(there.read().refused) == 7
    with pytest.raises(OriginError, match="more than 27 devices"):
        there.held(*many, ("one-more", WHOLE, GPU_0))
    with pytest.raises(OriginError, match=f"^INTERNAL: {'a ' * 195}$"):
        there.read("a\n" * 1000)
    monkeypatch.setattr(kubelet, "DEADLINE_S", 0.05)
    there.kubelet.answering.clear()
    with pytest.raises(OriginError, match="DEADLINE_EXCEEDED"):
        there.read()
    # The next one gets a connection of its own.
    assert getattr(there.origin._client, "_channel", "none") is None


def test_grpc_is_not_imported_without_a_kubelet(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from warpwatch_devices.attribution.source import AttributionSource\n"
        "from warpwatch_devices.attribution.kubelet import KubeletOrigin\n"
        "KubeletOrigin(Path(sys.argv[1])).read((), 0.0)\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'grpc', 'google'})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kubelet.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_generated_file_is_that_of_the_proto_file(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    package = Path(kubelet.__file__).parent
    proto = package / "podresources.proto"
    arguments = ["protoc", "-I", str(package.parents[1]), f"--python_out={tmp_path}", str(proto)]
    assert protoc.main(arguments) == 0
    generated = tmp_path / "warpwatch_devices/attribution/podresources_pb2.py"
    assert generated.read_text() == (package / "podresources_pb2.py").read_text()
