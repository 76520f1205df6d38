"""The dcgm_exporter source against HTTP servers on loopback that serve dcgm-exporter's format."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.exporters.receiver import Answer, http_server
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch_devices.config import DcgmExporterConfig
from warpwatch_devices.dcgm import exporter_source
from warpwatch_devices.dcgm.exporter_source import DcgmExporterSource, read
from warpwatch_devices.source import SourceContext
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.samples import Device, DeviceSample, SourceHealth

A100 = "GPU-11111111-aaaa-bbbb-cccc-000000000000"
OTHER = "GPU-22222222-aaaa-bbbb-cccc-000000000000"


def labels(uuid: str = A100, index: int = 0, more: str = "", instance: str = "") -> str:
    return f'gpu="{index}",UUID="{uuid}",modelName="NVIDIA A100"{instance}{more}'


def instance(gi: int, profile: str = "1g.10gb") -> str:
    return f',GPU_I_PROFILE="{profile}",GPU_I_ID="{gi}"'


TYPICAL = Path(__file__).with_name("dcgm_exporter.prom").read_text()


class Node:
    """An exporter and the source that reads it. ``known``: the devices of NVML."""

    def __init__(self) -> None:
        self.body: bytes = TYPICAL.encode()
        self.code = 200
        self.headers: dict[str, str] = {}
        self.takes_s = 0.0
        self.asked: list[Any] = []
        self.known: tuple[DeviceSample, ...] = ()
        self.clock, self.sink = ManualClock(), RecordingSink()
        self._stack = ExitStack()
        self.serve()
        self.ask_at(f"http://{self.address}/metrics")

    def serve(self, port: int = 0) -> None:
        url = self._stack.enter_context(http_server(self._answer, port=port))
        self.address = url.removeprefix("http://")

    def _answer(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        self.asked.append(headers)
        self.clock.advance(self.takes_s)
        return self.code, self.headers, self.body

    def ask_at(self, url: str) -> None:
        self.loops = HandLoops(self.clock)
        around = SourceContext(lambda _: None, lambda: self.known, lambda: False, lambda _: None)
        clocks = {"monotonic": self.clock.monotonic, "wall": self.clock.wall}
        DcgmExporterSource(DcgmExporterConfig(url=url), around, **clocks).start(
            self.loops, self.sink
        )

    def read(self, text: str | None = None) -> SourceHealth:
        if text is not None:
            self.body = text.encode()
        self.clock.advance(10)
        self.loops.run("dcgm_exporter")
        return self.sink.healths[-1]

    def newest(self, uuid: str) -> DeviceSample:
        return self.sink.devices[uuid][-1]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(exporter_source, "TIMEOUT_S", DEADLINE_S)
    node = Node()
    yield node
    node.close()


def of_nvml(uuid: str, index: int, gpu_instance: str = "", parent: str = "") -> DeviceSample:
    info = {"parent_uuid": parent or A100} if gpu_instance else {}
    return DeviceSample(Device(uuid, index, "NVIDIA A100", gpu_instance, info=info), 1.0)


def test_its_values_become_ours(node, golden):
    node.takes_s = 0.5
    health = node.read()
    assert (health.up, health.errors, health.duration_s) == (True, 0, 0.5)
    sample = node.newest(A100)
    assert (sample.source, sample.up) == ("dcgm_exporter", True)
    assert sample.time == node.clock.wall() - 0.5
    assert all(name in CATALOGUE for name, _ in sample.values)
    lines = [str(sample.device), *(f"{key} {sample.values[key]}" for key in sorted(sample.values))]
    golden("dcgm_exporter.txt", "".join(f"{line}\n" for line in lines).encode())


def test_a_scrape_that_says_the_same_again_is_not_published(node):
    for _ in range(3):
        node.read()
    assert len(node.sink.devices[A100]) == 1
    node.read(TYPICAL.replace("} 87", "} 88"))
    assert len(node.sink.devices[A100]) == 2
    assert node.newest(A100).values["device_utilization_ratio", ()] == 0.88
    # A device that is no longer served is forgotten.
    more = f"DCGM_FI_DEV_GPU_TEMP{{{labels(OTHER, 1)}}} 50\nDCGM_FI_DEV_GPU_TEMP{{}} 50\n"
    assert node.read(TYPICAL + more).errors == 1
    assert list(node.sink.devices) == [A100, OTHER]
    node.read(TYPICAL)
    assert list(node.sink.devices) == [A100]


def test_credentials_of_the_url_are_sent_and_never_shown(node):
    node.code = 401
    node.ask_at(f"http://scraper:se%20cret@{node.address}/metrics")
    assert node.read().reason == f"dcgm-exporter at {node.address}: it answers 401"
    node.ask_at(f"http://scraper@{node.address}/metrics")
    node.read()
    sent = [one["Authorization"] for one in node.asked]
    assert sent == ["Basic c2NyYXBlcjpzZSBjcmV0", "Basic c2NyYXBlcjo="]


def test_pages_are_read_as_far_as_they_can_be(cases):
    def found(page: str) -> str:
        devices, rejected = read(page)
        # As it was written, \r\n ends lines too.
        assert read(page.replace("\n", "\r\n")) == (devices, rejected)
        values = [f"{one.device!r} {one.values!r}" for one in devices]
        return "; ".join([f"{rejected} rejected", *values])

    cases("dcgm_pages.txt", found)
    endless = f"DCGM_FI_DEV_GPU_TEMP{{{labels(more=instance(7, 20_000 * 'x'))}}} 43"
    assert read(endless) == ([], 1)


MIG = (
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels(instance=instance(7))}}} 0.5\n"
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels(instance=instance(9))}}} 0.25\n"
)


def test_the_number_of_devices_is_bounded(monkeypatch):
    monkeypatch.setattr(exporter_source, "MAX_DEVICES", 10)
    lines = [f"DCGM_FI_DEV_GPU_TEMP{{{labels(uuid=f'GPU-{i}')}}} 40" for i in range(15)]
    # A device that is known gets all of its values.
    lines.append(f"DCGM_FI_DEV_MEMORY_TEMP{{{labels(uuid='GPU-0')}}} 50")
    devices, rejected = read("\n".join(lines))
    assert (len(devices), rejected, len(devices[0].values)) == (10, 5, 2)


def test_gpu_instances_are_the_mig_devices_of_nvml(node):
    # Without NVML they have keys of their own.
    node.read(MIG)
    assert sorted(node.sink.devices) == [f"{A100}/gi7", f"{A100}/gi9"]
    seven = node.newest(f"{A100}/gi7").device
    assert (seven.gpu_instance, seven.profile) == ("7", "1g.10gb")
    # NVML counts from the bus, dcgm-exporter's number of the GPU is not believed.
    node.known = (
        of_nvml(A100, 3),
        of_nvml("MIG-elsewhere", 3, "7", "GPU-that-is-gone"),
        of_nvml("MIG-seven", 3, "7"),
        of_nvml("MIG-nine-first", 3, "9"),
        of_nvml("MIG-nine-second", 3, "9"),
    )
    node.read(MIG.replace("0.5", "0.625"))
    assert sorted(node.sink.devices) == ["MIG-nine-first", "MIG-seven"]
    assert node.newest("MIG-seven").device == node.known[2].device
    assert node.newest("MIG-seven").values == {("device_graphics_active_ratio", ()): 0.625}
    # One that NVML does not know of its GPU is left out.
    node.known = node.known[:3]
    node.read(MIG)
    assert list(node.sink.devices) == ["MIG-seven"]


def test_an_exporter_that_is_back_is_read(node, caplog):
    node.read()
    node.close()
    text = f"dcgm-exporter at {node.address}: nothing listens there; is dcgm-exporter running?"
    assert [node.read().reason for _ in range(3)] == [text] * 3
    assert caplog.messages == [text]
    # Values stay unchanged and become stale by their own time.
    assert len(node.sink.devices[A100]) == 1
    node.serve(int(node.address.rpartition(":")[2]))
    assert node.read(TYPICAL.replace("} 43", "} 44")).up
    assert node.newest(A100).values["device_temperature_celsius", ("gpu",)] == 44.0


@pytest.mark.parametrize(
    ("code", "body", "headers", "said"),
    [
        (500, "no GPU", {}, "it answers 500"),
        (200, "<html>hello</html>", {}, "without values of a GPU"),
        (200, "", {}, "without values of a GPU"),
        (200, TYPICAL, {"Content-Length": "999999"}, "cut short"),
        (302, "", {"Location": "/metrics"}, "it answers 302"),
        (10**300, "", {}, "HTTP/1.0 1000"),
    ],
)
def test_a_bad_answer_is_said(node, code, body, headers, said):
    node.code, node.headers = code, headers
    health = node.read(body)
    assert said in health.reason and "\n" not in health.reason and len(health.reason) < 300
    assert not health.up and node.sink.devices == {} and health.errors > 0


def test_a_late_answer_is_dropped(node, monkeypatch):
    monkeypatch.setattr(exporter_source, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node.ask_at("http://{}:{}/".format(*silent.getsockname()))
        assert node.read().reason.endswith("no answer within 0.1 s")


def test_answers_are_bounded(node, monkeypatch):
    monkeypatch.setattr(exporter_source, "MAX_BODY_BYTES", 5000)
    assert node.read("#" * 5001).reason.endswith("its answer is longer than 5000 bytes")
    assert node.read(TYPICAL + "#" * (5000 - len(TYPICAL))).up
