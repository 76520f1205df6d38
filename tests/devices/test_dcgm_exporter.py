"""The dcgm_exporter source against HTTP servers on loopback that serve dcgm-exporter's format."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.devices.recording import RecordingSink, wait_until
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices.config import DcgmExporterConfig
from warpwatch_devices.dcgm.exporter_source import DcgmExporterSource
from warpwatch_devices.dcgm.scrape import parse, read
from warpwatch_devices.source import Surroundings
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.samples import Device, DeviceSample

A100 = "GPU-11111111-aaaa-bbbb-cccc-000000000000"
OTHER = "GPU-22222222-aaaa-bbbb-cccc-000000000000"


def labels(
    uuid: str = A100, index: int = 0, host: str = "node-7", more: str = "", instance: str = ""
) -> str:
    return (
        f'gpu="{index}",UUID="{uuid}",pci_bus_id="00000000:0{index}:00.0",device="nvidia{index}",'
        f'modelName="NVIDIA A100-SXM4-80GB"{instance},Hostname="{host}",'
        f'DCGM_FI_DRIVER_VERSION="550.54.15"{more}'
    )


def instance(gi: int, profile: str = "1g.10gb") -> str:
    return f',GPU_I_PROFILE="{profile}",GPU_I_ID="{gi}"'


TYPICAL = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock in MHz.
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{labels()}}} 1410
DCGM_FI_DEV_GPU_TEMP{{{labels()}}} 43
DCGM_FI_DEV_POWER_USAGE{{{labels()}}} 312.250000
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{labels()}}} 91234567
DCGM_FI_DEV_GPU_UTIL{{{labels()}}} 87
DCGM_FI_DEV_FB_USED{{{labels()}}} 1024
DCGM_FI_DEV_XID_ERRORS{{{labels()},err_code="31",err_msg="MMU fault, \\"page\\""}} 31
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{labels()}}} 4711
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels()}}} 0.912500
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{labels()}}} 0.431000
DCGM_FI_PROF_PCIE_TX_BYTES{{{labels()}}} 1500000000
go_goroutines 17
"""


class Exporter:
    """What the server answers; change it at any time."""

    def __init__(self) -> None:
        self.body: bytes = TYPICAL.encode()
        self.code = 200
        self.headers: dict[str, str] = {}
        self.compress = False
        self.before: Callable[[], object] = lambda: None
        self.asked: list[dict[str, str]] = []

    def serve(self, text: str) -> None:
        self.body = text.encode()


def serve(exporter: Exporter, port: int = 0) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            exporter.asked.append({key.lower(): text for key, text in self.headers.items()})
            exporter.before()
            body = gzip.compress(exporter.body) if exporter.compress else exporter.body
            headers = {"Content-Length": str(len(body))}
            if exporter.compress:
                headers["Content-Encoding"] = "gzip"
            self.send_response(exporter.code)
            for name, text in (headers | exporter.headers).items():
                self.send_header(name, text)
            self.end_headers()
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture
def exporter() -> Iterator[tuple[Exporter, str]]:
    stand_in = Exporter()
    server = serve(stand_in)
    yield stand_in, f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


@contextmanager
def running(
    url: str, known: tuple[DeviceSample, ...] = (), timeout_s: float = 5.0
) -> Iterator[RecordingSink]:
    surroundings = Surroundings(lambda _: None, lambda: known, lambda: False, lambda _: None)
    config = DcgmExporterConfig(url=url)
    sink, supervisor = RecordingSink(), Supervisor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NODE_NAME", "node-7")
        patch.setattr("warpwatch_devices.dcgm.exporter_source.TIMEOUT_S", timeout_s)
        patch.setattr("warpwatch_devices.dcgm.exporter_source.INTERVAL_S", 0.1)
        source = DcgmExporterSource(config, surroundings)
        try:
            source.start(supervisor, sink)
            yield sink
        finally:
            supervisor.stop()
            source.close()


def reason(sink: RecordingSink) -> str:
    return sink.healths[-1].reason if sink.healths and not sink.healths[-1].up else ""


def newest(sink: RecordingSink, uuid: str) -> DeviceSample | None:
    with sink.lock:
        return sink.devices[uuid][-1] if uuid in sink.devices else None


def of_nvml(uuid: str, index: int, gpu_instance: str = "", parent: str = "") -> DeviceSample:
    info = {"parent_uuid": parent or A100} if gpu_instance else {}
    return DeviceSample(Device(uuid, index, "NVIDIA A100", gpu_instance, info=info), 1.0)


def test_its_values_become_ours_in_base_units(exporter: tuple[Exporter, str]) -> None:
    begun = time.time()
    with running(exporter[1]) as sink:
        wait_until(lambda: newest(sink, A100))
    sample = newest(sink, A100)
    assert sample is not None and sample.source == "dcgm_exporter" and sample.up
    assert begun <= sample.time <= time.time()
    assert sample.values == {
        ("device_clock_hertz", ("sm",)): 1.41e9,
        ("device_temperature_celsius", ("gpu",)): 43.0,
        ("device_power_watts", ()): 312.25,
        ("device_energy_joules_total", ()): 91234.567,
        ("device_utilization_ratio", ()): 0.87,
        ("device_memory_used_bytes", ()): 1073741824.0,
        ("device_graphics_active_ratio", ()): 0.9125,
        ("device_tensor_active_ratio", ()): 0.431,
        ("device_pcie_transmit_bytes_per_second", ()): 1.5e9,
    }
    assert all(name in CATALOGUE for name, _ in sample.values)
    assert sample.device == Device(
        A100,
        0,
        "NVIDIA A100-SXM4-80GB",
        info={"pci_bus_id": "00000000:00:00.0", "driver_version": "550.54.15"},
    )
    assert sink.healths[-1].up and sink.healths[-1].errors == 0


def test_a_scrape_that_says_the_same_again_is_not_published(
    exporter: tuple[Exporter, str],
) -> None:
    stand_in, url = exporter
    with running(url) as sink:
        wait_until(lambda: len(stand_in.asked) >= 4)
        assert len(sink.devices[A100]) == 1
        stand_in.serve(TYPICAL.replace("} 87", "} 88"))
        wait_until(lambda: len(sink.devices[A100]) == 2)
    assert sink.devices[A100][1].values["device_utilization_ratio", ()] == 0.88


def test_gzip_is_asked_for_and_understood(exporter: tuple[Exporter, str]) -> None:
    stand_in, url = exporter
    stand_in.compress = True
    with running(url) as sink:
        wait_until(lambda: newest(sink, A100))
    assert stand_in.asked[0]["accept-encoding"] == "gzip"


def test_credentials_of_the_url_are_sent_and_never_shown(exporter: tuple[Exporter, str]) -> None:
    stand_in, url = exporter
    stand_in.code = 401
    with running(url.replace("http://", "http://scraper:se%20cret@")) as sink:
        wait_until(lambda: reason(sink))
    assert stand_in.asked[0]["authorization"] == "Basic c2NyYXBlcjpzZSBjcmV0"
    server = url.removeprefix("http://").removesuffix("/metrics")
    assert reason(sink) == f"dcgm-exporter at {server}: it answers 401"


def test_values_that_cannot_be_are_dropped_and_counted() -> None:
    text = "\n".join(
        (
            f"DCGM_FI_DEV_GPU_TEMP{{{labels()}}} 2147483632",
            f"DCGM_FI_DEV_FB_USED{{{labels()}}} 9223372036854775794",
            f"DCGM_FI_DEV_POWER_USAGE{{{labels()}}} 140737488355330.000000",
            f"DCGM_FI_DEV_SM_CLOCK{{{labels()}}} -5",
            f"DCGM_FI_DEV_MEM_CLOCK{{{labels()}}} NaN",
            f"DCGM_FI_DEV_FB_FREE{{{labels()}}} +Inf",
            f"DCGM_FI_DEV_GPU_UTIL{{{labels()}}} 106",
            f"DCGM_FI_PROF_DRAM_ACTIVE{{{labels()}}} 1.06",
            f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels()}}} 1.04",
            f"DCGM_FI_PROF_SM_ACTIVE{{{labels()}}} 0",
        )
    )
    scrape = read(text, "node-7")
    assert scrape.rejected == 8
    # A little more than all is all; 0 is a value.
    assert scrape.devices[0].values == {
        ("device_graphics_active_ratio", ()): 1.0,
        ("device_sm_active_ratio", ()): 0.0,
    }


def test_broken_lines_cost_themselves_alone() -> None:
    good = f"DCGM_FI_DEV_GPU_TEMP{{{labels()}}} 43"
    broken = (
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_GPU_TEMP{",
        "DCGM_FI_DEV_GPU_TEMP} 4",
        "DCGM_FI_DEV_GPU_TEMP\0{} 4",
        f"DCGM_FI_DEV_GPU_TEMP{{{labels()}}}",
        f"DCGM_FI_DEV_GPU_TEMP{{{labels()}}} 4_3",
        f"DCGM_FI_DEV_GPU_TEMP{{{labels()}}} {'9' * 400}",
        'DCGM_FI_DEV_GPU_TEMP{gpu="0", =UUID="GPU-1"} 43',
        f'DCGM_FI_DEV_GPU_TEMP{{{labels()},gpu="1"}} 43',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0" UUID="GPU-1"} 43',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1} 43',
        'DCGM_FI_DEV_GPU_TEMP{gpu="' + "0" * 20_000 + '"} 43',
    )
    no_device = (
        "DCGM_FI_DEV_GPU_TEMP{} 43",
        'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 43',
        'DCGM_FI_DEV_GPU_TEMP{gpu="zero",UUID="GPU-1"} 43',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU 1"} 43',
        f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{"G" * 97}"}} 43',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",GPU_I_ID="../7"} 43',
    )
    scrape = read("\n".join((*broken, good, *no_device)), "node-7")
    assert scrape.rejected == 18
    assert [scraped.device.uuid for scraped in scrape.devices] == [A100]


def test_labels_are_unescaped_and_may_hold_braces_and_commas() -> None:
    line = r'DCGM_X{a="one, \"two\"} 7",b="back\\slash",c="new\nline",} 2.5e+3 1700000000000'
    (sample,) = parse(line, {"DCGM_X"})
    assert sample is not None
    assert sample.labels == {"a": 'one, "two"} 7', "b": "back\\slash", "c": "new\nline"}
    assert (sample.name, sample.value) == ("DCGM_X", 2500.0)


def test_the_number_of_devices_is_bounded() -> None:
    lines = [f"DCGM_FI_DEV_GPU_TEMP{{{labels(uuid=f'GPU-{i}')}}} 40" for i in range(1500)]
    scrape = read("\n".join(lines), "node-7")
    assert len(scrape.devices) == 1024 and scrape.rejected == 476
    lines = [f"DCGM_FI_DEV_GPU_TEMP{{{labels(host=f'host-{i}')}}} 40" for i in range(1500)]
    assert len(read("\n".join(lines), "node-7").hosts) == 1024


def test_names_of_older_and_newer_releases_are_understood() -> None:
    text = (
        'DCGM_FI_DEV_GPU_TEMP{gpu="1",uuid="GPU-9",device="nvidia1"} 40\n'
        'DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-9",hostname="node-7",modelName="<<<NULL>>>"} 2\n'
        'DCGM_FI_DEV_FB_FREE{UUID="GPU-9",device="nvidia1"} 3\r\n'
    )
    scrape = read(text, "node-7")
    assert scrape.rejected == 0 and len(scrape.devices) == 1
    assert scrape.devices[0].device == Device("GPU-9", 1, "")
    assert len(scrape.devices[0].values) == 3


def test_of_several_hosts_only_this_one_is_read() -> None:
    text = (
        f"DCGM_FI_DEV_GPU_TEMP{{{labels(host='node-7.cluster.local')}}} 40\n"
        f"DCGM_FI_DEV_GPU_TEMP{{{labels(OTHER, host='node-8')}}} 50\n"
    )
    assert [one.device.uuid for one in read(text, "node-7").devices] == [A100]
    assert [one.device.uuid for one in read(text, "node-8").devices] == [OTHER]
    assert read(text, "node-9").devices == []
    assert [one.device.uuid for one in read(text, "node-7.other.net").devices] == []
    # One host may call itself as it likes, such as by its pod's name.
    assert len(read(f"DCGM_FI_DEV_GPU_TEMP{{{labels(host='exporter-x1')}}} 40", "node-7").devices)


def test_hosts_none_of_which_is_this_one_are_said(exporter: tuple[Exporter, str]) -> None:
    stand_in, url = exporter
    stand_in.serve(
        f"DCGM_FI_DEV_GPU_TEMP{{{labels(host='a')}}} 4\n"
        f"DCGM_FI_DEV_GPU_TEMP{{{labels(host='b')}}} 4\n"
    )
    with running(url) as sink:
        wait_until(lambda: reason(sink))
    assert reason(sink).endswith("it serves 2 hosts (a, b, …) but not node-7")
    assert sink.devices == {}


def test_copies_for_jobs_and_virtual_gpus_do_not_replace_the_device() -> None:
    copy = ',vgpu="0",pod="one"'
    jobs = [',hpc_job="12"', ',hpc_job="13"']
    text = (
        f"DCGM_FI_DEV_GPU_UTIL{{{labels(more=copy)}}} 11\n"
        f"DCGM_FI_DEV_GPU_TEMP{{{labels(more=copy)}}} 40\n"
        f"DCGM_FI_DEV_FB_USED{{{labels(more=copy)}}} 512\n"
        f"DCGM_FI_DEV_GPU_UTIL{{{labels(more=jobs[0])}}} 90\n"
        f"DCGM_FI_DEV_GPU_UTIL{{{labels(more=jobs[1])}}} 90\n"
    )
    scrape = read(text, "node-7")
    assert scrape.devices[0].values == {
        ("device_utilization_ratio", ()): 0.9,
        ("device_temperature_celsius", ("gpu",)): 40.0,
    }


MIG = (
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels(instance=instance(7))}}} 0.5\n"
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels(instance=instance(9))}}} 0.25\n"
)


def test_gpu_instances_are_the_mig_devices_of_nvml(exporter: tuple[Exporter, str]) -> None:
    exporter[0].serve(MIG)
    # NVML counts from the bus, dcgm-exporter's number of the GPU is not believed.
    known = (
        of_nvml(A100, 3),
        of_nvml("MIG-elsewhere", 3, "7", "GPU-that-is-gone"),
        of_nvml("MIG-seven", 3, "7"),
        of_nvml("MIG-nine-first", 3, "9"),
        of_nvml("MIG-nine-second", 3, "9"),
    )
    with running(exporter[1], known) as sink:
        wait_until(lambda: newest(sink, "MIG-nine-first"))
    assert sorted(sink.devices) == ["MIG-nine-first", "MIG-seven"]
    seven = newest(sink, "MIG-seven")
    assert seven is not None and seven.device == known[2].device
    assert seven.values == {("device_graphics_active_ratio", ()): 0.5}


def test_what_is_repeated_for_every_instance_is_the_gpus() -> None:
    text = "".join(
        f"DCGM_FI_DEV_POWER_USAGE{{{labels(instance=instance(gi))}}} 300.000000\n"
        f"DCGM_FI_PROF_PCIE_TX_BYTES{{{labels(instance=instance(gi))}}} 1000\n"
        f"DCGM_FI_DEV_FB_USED{{{labels(instance=instance(gi))}}} {gi}\n"
        for gi in (7, 9)
    )
    scrape = read(text, "node-7")
    assert {one.device.gpu_instance: one.values for one in scrape.devices} == {
        "": {
            ("device_power_watts", ()): 300.0,
            ("device_pcie_transmit_bytes_per_second", ()): 1000.0,
        },
        "7": {("device_memory_used_bytes", ()): 7 * 1048576.0},
        "9": {("device_memory_used_bytes", ()): 9 * 1048576.0},
    }
    assert all(one.device.uuid == A100 for one in scrape.devices)


def test_an_instance_that_nvml_does_not_know_of_its_gpu_is_left_out(
    exporter: tuple[Exporter, str],
) -> None:
    exporter[0].serve(MIG)
    with running(exporter[1], (of_nvml(A100, 0), of_nvml("MIG-seven", 0, "7"))) as sink:
        wait_until(lambda: newest(sink, "MIG-seven"))
    assert list(sink.devices) == ["MIG-seven"]


def test_instances_of_a_gpu_without_nvml_have_their_own_key(
    exporter: tuple[Exporter, str],
) -> None:
    exporter[0].serve(MIG)
    with running(exporter[1]) as sink:
        wait_until(lambda: newest(sink, f"{A100}/gi9"))
    assert sorted(sink.devices) == [f"{A100}/gi7", f"{A100}/gi9"]
    seven = newest(sink, f"{A100}/gi7")
    assert seven is not None
    assert (seven.device.gpu_instance, seven.device.profile) == ("7", "1g.10gb")


def test_a_device_that_is_not_served_any_more_is_forgotten(
    exporter: tuple[Exporter, str],
) -> None:
    stand_in, url = exporter
    other = f"DCGM_FI_DEV_GPU_TEMP{{{labels(OTHER, 1)}}} 50\n"
    stand_in.serve(TYPICAL + other)
    with running(url) as sink:
        wait_until(lambda: newest(sink, OTHER))
        stand_in.serve(TYPICAL)
        wait_until(lambda: OTHER not in sink.devices)
        assert A100 in sink.devices


def test_an_exporter_that_goes_away_and_comes_back_is_read_again() -> None:
    stand_in = Exporter()
    server = serve(stand_in)
    port = server.server_port
    with running(f"http://127.0.0.1:{port}/metrics") as sink:
        wait_until(lambda: sink.healths and sink.healths[-1].up)
        server.shutdown()
        server.server_close()
        wait_until(lambda: "running?" in reason(sink))
        assert reason(sink) == (
            f"dcgm-exporter at 127.0.0.1:{port}: nothing listens there; is dcgm-exporter running?"
        )
        # What was read stays as it was, to go stale by its own time.
        assert len(sink.devices[A100]) == 1
        stand_in.serve(TYPICAL.replace("} 43", "} 44"))
        server = serve(stand_in, port)
        wait_until(lambda: sink.healths[-1].up)
    server.shutdown()
    server.server_close()
    assert sink.devices[A100][-1].values["device_temperature_celsius", ("gpu",)] == 44.0


@pytest.mark.parametrize(
    ("code", "body", "headers", "said"),
    [
        (500, "no GPU", {}, "it answers 500"),
        (200, "<html>hello</html>", {}, "without values of a GPU"),
        (200, "", {}, "without values of a GPU"),
        (200, "x", {"Content-Encoding": "br"}, "in the encoding 'br'"),
        (200, "not gzip", {"Content-Encoding": "gzip"}, "incorrect header"),
        (200, TYPICAL, {"Content-Length": "999999"}, "cut short"),
        (302, "", {"Location": "http://127.0.0.2:1/metrics"}, "redirects to another server"),
        (302, "", {"Location": "file:///etc/passwd"}, "it answers 302"),
        (302, "", {"Location": "/metrics"}, "it answers 302"),
    ],
)
def test_answers_that_are_none_are_said_in_one_line(
    exporter: tuple[Exporter, str], code: int, body: str, headers: dict[str, str], said: str
) -> None:
    stand_in, url = exporter
    stand_in.code, stand_in.headers = code, headers
    stand_in.serve(body)
    with running(url) as sink:
        wait_until(lambda: reason(sink))
    assert said in reason(sink) and "\n" not in reason(sink)
    assert sink.devices == {} and sink.healths[-1].errors > 0


def test_an_answer_that_does_not_end_is_given_up(exporter: tuple[Exporter, str]) -> None:
    stand_in, url = exporter
    gate = threading.Event()
    stand_in.before = gate.wait
    with running(url, timeout_s=0.2) as sink:
        wait_until(lambda: reason(sink))
        assert reason(sink).endswith("no answer within 0.2 s")
        gate.set()
        wait_until(lambda: sink.healths[-1].up)


def test_an_answer_that_drips_is_given_up() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"#")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        try:
            with running(url, timeout_s=0.3) as sink:
                wait_until(lambda: reason(sink))
        finally:
            stop.set()
            thread.join()
    assert reason(sink).endswith("no answer within 0.3 s")


def test_answers_are_bounded_also_after_decompression(exporter: tuple[Exporter, str]) -> None:
    stand_in, url = exporter
    stand_in.body = b"#" * (16 * 2**20 + 1)
    with running(url, timeout_s=60) as sink:
        wait_until(lambda: reason(sink))
        assert reason(sink).endswith("its answer is longer than 16777216 bytes")
        stand_in.compress = True
        asked = len(stand_in.asked)
        wait_until(lambda: len(stand_in.asked) > asked + 1)
        assert reason(sink).endswith("its answer is longer than 16777216 bytes")
        stand_in.serve(TYPICAL)
        wait_until(lambda: sink.healths[-1].up)
