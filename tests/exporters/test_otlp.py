"""OpenTelemetry: a collector receives what /metrics says, and each event as a log record."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests import locks
from tests.exporters.receiver import Receiver
from tests.exporters.states import CAPTURE, LONG, NOW, SLOW, full_state, rank, simulated, state_of
from tests.manual_clock import ManualClock
from tests.waiting import eventually, is_listening
from warpwatch_daemon.config import Config
from warpwatch_daemon.demo.processes import free_port
from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.config import OtlpConfig
from warpwatch_exporters.events import EventFeed
from warpwatch_exporters.otlp import OtlpExporter
from warpwatch_exporters.push import PushExporters
from warpwatch_runtime import loading
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.samples import Device, DeviceSample

ROTEL = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages/rotel")
STATE = replace(state_of(), devices=simulated(1, 5), ranks=(rank(0),))


class Site:
    def __init__(self, url: str, **config: Any) -> None:
        self.state = STATE
        self.counted: Counter[tuple[str, str]] = Counter()
        self.clock = ManualClock()
        self.exporter = OtlpExporter(
            OtlpConfig(endpoint=url, **config),
            StateCollector(lambda: self.state, "default").collect,
            "gpu-17",
            {"service.name": "warpwatch", "service.instance.id": "gpu-17"},
            lambda signal, result, count: self.counted.update({(signal, result): count}),
            self.clock.monotonic,
            self.clock.wall,
        )
        self.events = EventFeed(self.state)

    def advance(self, passed_s: float = 0.0) -> None:
        self.clock.advance(passed_s)
        self.exporter.advance(self.events.drain(self.state))


def metrics_in(server: Receiver) -> dict[str, Any]:
    newest = server.bodies("/v1/metrics")[-1:] or [b""]
    said = ExportMetricsServiceRequest.FromString(newest[0])
    if not said.resource_metrics:
        return {}
    return {one.name: one for one in said.resource_metrics[0].scope_metrics[0].metrics}


def logs_in(server: Receiver) -> list[Any]:
    said = map(ExportLogsServiceRequest.FromString, server.bodies("/v1/logs"))
    scopes = [scope for one in said for of in one.resource_logs for scope in of.scope_logs]
    return [record for scope in scopes for record in scope.log_records]


@contextmanager
def rotel(target: str, port: int, folder: Path) -> Iterator[None]:
    """A collector that passes on what it receives. https://rotel.dev"""
    arguments = ["--otlp-http-endpoint", f"127.0.0.1:{port}", "--otlp-grpc-endpoint"]
    arguments += [f"127.0.0.1:{free_port()}", "--exporter", "otlp", "--otlp-exporter-endpoint"]
    arguments += [target, "--otlp-exporter-protocol", "http", "--pid-file", str(folder / "pid")]
    process = subprocess.Popen(
        [str(ROTEL / "rotel-agent"), "start", *arguments, "--log-file", str(folder / "rotel.log")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_metrics_have_the_names_labels_and_units_of_the_page(server: Receiver, golden: Any) -> None:
    site = Site(f"{server.url}/")
    # The SDK takes no boolean.
    modes = DeviceSample(Device("GPU-9", 9, "L4"), NOW, {("device_mig_mode", ()): True})
    site.state = replace(STATE, devices=(*STATE.devices, modes))
    site.advance()
    assert site.exporter._current()[0]._endpoint == f"{server.url}/v1/metrics"
    assert server.requests[-1][1]["Content-Encoding"] == "gzip"
    metrics = metrics_in(server)
    names = ("device_power_watts", "steps", "step_duration_seconds")
    shown = [MessageToDict(metrics[f"warpwatch_{name}"]) for name in names]
    golden("exporters/otlp_metrics.json", json.dumps(shown, indent=1).encode())


def test_an_anomaly_its_capture_and_their_ends_are_one_trace(server: Receiver, golden: Any) -> None:
    site = Site(server.url)
    slow = replace(SLOW, summary=f"{SLOW.summary} \udcff{'x' * 999}", owner="team\udcff")
    running = replace(CAPTURE, id="20260921T142000-000002", outcome=None, diagnosis=None)
    failed = replace(running, id="failed", outcome="partial", diagnosis_outcome="crashed")
    site.state = replace(STATE, anomalies=(slow,), captures=(LONG, running, failed))
    site.advance()
    site.state = replace(site.state, anomalies=(replace(slow, end_time=NOW + 60),))
    site.advance()
    site.advance(30)
    records = logs_in(server)
    shown = [*map(MessageToDict, records)]
    golden("exporters/otlp_logs.json", json.dumps(shown, indent=1).encode())
    assert len({one.trace_id for one in records}) == 1
    assert site.counted == {("metrics", "sent"): 1, ("logs", "sent"): 5}


def test_while_the_collector_is_away_logs_wait_in_a_bounded_queue(server, caplog):
    site = Site(server.url)
    server.status = 500
    site.state = replace(STATE, anomalies=(SLOW,))
    site.advance()
    site.advance()
    assert site.counted == {("metrics", "failed"): 1}
    assert caplog.text.count("metrics batch code: 500, reason: Internal Server Error") == 1
    many = tuple(replace(SLOW, id=f"6553f1f0-{number}") for number in range(2, 1009))
    site.state = replace(STATE, anomalies=(SLOW, *many))
    site.advance(30)
    assert site.counted == {
        ("metrics", "failed"): 1, ("logs", "dropped"): 8, ("logs", "failed"): 200,
    }  # fmt: skip
    server.status, server.requests = 200, []
    site.advance(300)
    bodies = {one.key: one.value for record in logs_in(server)[-1:] for one in record.attributes}
    assert (len(logs_in(server)), bodies["warpwatch.anomaly"].string_value) == (1000, many[-1].id)
    assert site.counted["logs", "sent"] == 1000
    assert len(caplog.records) == 1
    server.status = 400
    site.advance(60)
    assert len(caplog.records) == 2 and "code: 400, reason: Bad Request" in caplog.messages[1]


def test_a_collector_passes_on_what_it_is_sent(server: Receiver, tmp_path: Path) -> None:
    port = free_port()
    with rotel(server.url, port, tmp_path):
        eventually(lambda: is_listening(port), "the collector's start")
        site = Site(f"http://127.0.0.1:{port}")
        site.state = replace(STATE, anomalies=(SLOW,))
        site.advance()
        (opened,) = eventually(lambda: logs_in(server), "logs")
        assert opened.event_name == "warpwatch.anomaly_opened"
        eventually(lambda: "warpwatch_device_power_watts" in metrics_in(server), "metrics")


def test_headers_are_read_again_and_sent(server: Receiver, tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    headers.write_text("api-key: first\n")
    site = Site(server.url, headers_file=headers)
    site.advance()
    headers.write_text("api-key: second\n")
    site.advance(60)
    assert [sent["api-key"] for _, sent, _ in server.requests] == ["first", "second"]
    headers.write_text("no header")
    site.advance(60)
    assert len(server.requests) == 2
    assert site.counted == {("metrics", "sent"): 2, ("metrics", "failed"): 1}


def test_the_daemon_sends_its_own_metrics_too_and_names_itself(server: Receiver) -> None:
    inline = {"workload_labels": "inline"}
    both = {"otlp": {"endpoint": server.url}, "webhooks": 2 * [{"url": server.url}]}
    held = replace(full_state(), version=STATE.version)
    metrics = AgentMetrics()
    metrics.counter("http_requests_total").labels(200).inc()
    config = loading.parse(Config, {"exporters": both | {"prometheus": inline}}, "the test")
    over = replace(STATE, anomalies=(replace(SLOW, end_time=NOW + 60),))
    own = iter((STATE, STATE, STATE, over, over, over))
    ways = PushExporters(
        config.exporters, "gpu-17", "warpwatch", "", metrics, lambda: held, lambda: next(own)
    )
    assert list(ways.last_words) == ["webhook-0", "webhook-1", "otlp"]
    assert ways._all["webhook-1"]._send.__self__._name == "exporters.webhooks[1]"  # type: ignore[attr-defined]
    for last_words in ways.last_words.values():
        last_words()
    assert len(logs_in(server)) == 2
    assert "warpwatch_device_violation_seconds" not in metrics_in(server)
    # One that still waits for its peer is not waited for at the end.
    for way in ways._all.values():
        way._busy = locks.held()
        way.last()
        for busy in (way.advance, lambda way=way: way.know(())):
            with pytest.raises(locks.Waits):
                busy()
    counted = {one.name[10:]: one.samples for one in metrics.registry.collect()}
    assert [len(counted[name]) for name in ("otlp_exports", "webhook_messages")] == [6, 4]
    assert {one.value for one in counted["otlp_exports"]} == {0, 1, 2}
    assert "warpwatch_http_requests" in metrics_in(server)
    points = metrics_in(server)["warpwatch_device_power_watts"].gauge.data_points
    labels = {one.key: one.value.string_value for one in points[0].attributes}
    assert (labels["namespace"], labels["pod"]) == ("ml", "llama-0")
    said = ExportMetricsServiceRequest.FromString(server.bodies("/v1/metrics")[-1])
    attributes = said.resource_metrics[0].resource.attributes
    resource = {one.key: one.value.string_value for one in attributes}
    assert resource["service.instance.id"] == resource["host.name"] == "gpu-17"
    assert (resource["service.name"], resource["service.version"]) == ("warpwatch", "0.1.0")


def test_all_processes_of_a_fleet_report_an_anomaly_in_one_trace(server: Receiver) -> None:
    config = loading.parse(Config, {"exporters": {"otlp": {"endpoint": server.url}}}, "the test")
    other = replace(SLOW, id="6553f1f0-9")
    for node in ("fleet-0", "fleet-1", "fleet-2"):
        own = iter((STATE, replace(STATE, anomalies=(SLOW, other)))).__next__
        metrics = AgentMetrics()
        ways = PushExporters(
            config.exporters, node, "warpwatch-fleet", "", metrics, lambda: STATE, own
        )
        # The last one knows what the others have reported.
        ways.know([SLOW, other] if node == "fleet-2" else [])
        ways.last_words["otlp"]()
    first, _, second, _ = logs_in(server)
    assert (first.trace_id, first.span_id) == (second.trace_id, second.span_id)
