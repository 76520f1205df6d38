"""The pipeline's part in an anomaly's life: reported once, over restarts and failures."""

import json
from unittest.mock import Mock

import pytest

from tests.daemon.captures.capture_node import CaptureNode
from tests.daemon.state.counted import counted
from tests.manual_clock import ManualClock
from warpwatch_capturing.regular import Baseline, RegularCaptures
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.triggers import Triggers
from warpwatch_daemon.agent.pipeline import Pipeline, TelemetryLog
from warpwatch_daemon.config import Config
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_daemon.history.archive import Archive
from warpwatch_daemon.history.runs import RunFiles, RunTable
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_detection.detectors.deaths import Oom
from warpwatch_detection.engine import Detection
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import Clock, Record
from warpwatch_telemetry.samples import Device, DeviceSample


@pytest.fixture
def node(tmp_path, stack):
    return CaptureNode(tmp_path, stack)


@pytest.fixture
def clock(node):
    return node.clock


@pytest.fixture
def hub():
    return Hub(10.0)


def pipeline(
    node: CaptureNode, hub: Hub, clock: ManualClock, log: TelemetryLog | None = None
) -> Pipeline:
    config = Config()
    detection = Detection(config.detection, config.anomalies)
    archive = Archive(node.store.path, detection, lambda what: None, lambda: None)
    triggers = Triggers(node.service, node.source.targets, hub)
    baselines = RegularCaptures(Baseline(node.service, hub), node.service)
    stream, runs = RecordStream(), RunTable(RunFiles(node.store.path), hub, "node")
    return Pipeline(
        hub, node.source, detection, node.service, triggers, baselines, archive, stream, log, runs,
        clock.monotonic, clock.wall,
    )  # fmt: skip


@pytest.fixture
def stream(node, hub, clock):
    return pipeline(node, hub, clock)


def raise_exception(node: CaptureNode) -> None:
    node.rings[1].event("exception", type="ValueError", message="no")


def reported(hub: Hub, kind: str) -> list[Anomaly]:
    return [anomaly for anomaly in hub.state().anomalies if anomaly.kind == kind]


def test_an_anomaly_is_counted_once_and_known_to_the_next_daemon_before_its_first_round(
    node, hub, clock
):
    first = pipeline(node, hub, clock)
    first.step()
    raise_exception(node)
    first.step()
    (crash,) = reported(hub, "crash")
    assert counted(hub, "anomalies_total", "crash", "warning") == 1
    first.close()
    next_hub = Hub(10.0)
    second = pipeline(node, next_hub, clock)
    assert reported(next_hub, "crash") == [crash]
    second.step()
    assert reported(next_hub, "crash") == [crash]
    assert counted(next_hub, "anomalies_total", "crash", "warning") is None


def test_what_a_detector_cannot_take_costs_no_other_record(node, hub, stream, monkeypatch):
    stream.step()
    feed = Detection.feed
    refused: list[Record] = []

    def picky(self, record):
        if not refused:
            refused.append(record)
            raise ZeroDivisionError("a detector's mistake")
        return feed(self, record)

    monkeypatch.setattr(Detection, "feed", picky)
    node.rings[0].step()
    raise_exception(node)
    with pytest.raises(ZeroDivisionError):
        stream.step()
    assert len(refused) == 1
    assert len(reported(hub, "crash")) == 1


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (CaptureService, "observe"),
        (CaptureService, "advance"),
        (Archive, "observe"),
        (Archive, "advance"),
        (Archive, "note_change"),
        (Triggers, "advance"),
        (RanksSource, "devices"),
        (Oom, "observe"),
    ],
)
def test_a_stage_or_detector_that_fails_costs_no_other_one(
    node, hub, clock, monkeypatch, stage, name
):
    def fail(self, *args):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(stage, name, fail)
    stream = pipeline(node, hub, clock)
    raise_exception(node)
    with pytest.raises(ZeroDivisionError):
        stream.step()
    assert len(reported(hub, "crash")) == 1
    assert counted(hub, "anomalies_total", "crash", "warning") == 1
    errors = counted(hub, "detector_errors_total", "oom") or 0
    assert (errors > 0) is (stage is Oom)
    monkeypatch.undo()
    stream.step()


def test_the_log_says_after_five_seconds_of_silence_that_time_has_passed(
    node, hub, clock, tmp_path
):
    path = tmp_path / "telemetry.jsonl"
    log = TelemetryLog(JsonlWriter(path), hub.metrics, clock.wall)
    stream = pipeline(node, hub, clock, log)
    node.rings[0].step()
    stream.step()
    for later_s in (4.9, 0.2, 4.8):
        clock.advance(later_s)
        stream.step()
    log.write()
    types = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert "step" in types and types.count("clock") == 1
    assert types[-1] == "clock"
    assert counted(hub, "jsonl_records_total") == len(types)


@pytest.mark.parametrize("what", ["the clock was set", "the agent was stopped", "silence"])
def test_two_hours_of_silence_are_a_hang_unless_nothing_was_read_meanwhile(
    node, hub, clock, stream, caplog, what
):
    stream.step()
    for ring in node.rings * 30:
        ring.step()
    stream.step()
    if what == "the clock was set":
        clock.set_wall(clock.wall() + 7200.0)
    elif what == "the agent was stopped":
        clock.advance(7200.0)
    else:
        for _ in range(1440):
            clock.advance(5.0)
            stream.step()
    if what != "silence":
        # The ring keeps only the newest steps.
        for ring in node.rings * 3000:
            ring.step()
    stream.step()
    stream.step()
    assert [anomaly.kind for anomaly in reported(hub, "hang")] == ["hang"] * (what == "silence")
    leap = "the clock was set, or the machine or this agent stood still: 7200 s were skipped"
    assert (leap in caplog.text) is (what != "silence")


def test_records_wait_in_memory_only_as_long_as_there_is_a_bound(hub, tmp_path):
    log = TelemetryLog(JsonlWriter(tmp_path / "log"), hub.metrics, ManualClock().wall)
    for count in (200_000, 1, 1, 1):
        log.put([Clock(1.0)] * count, 1.0)
    log.write()
    assert counted(hub, "jsonl_errors_total") == 2
    assert counted(hub, "jsonl_records_total") == 200_001


def test_a_full_disk_is_logged_again_after_it_had_room(hub, tmp_path, monkeypatch, caplog):
    log = TelemetryLog(JsonlWriter(tmp_path / "log"), hub.metrics, ManualClock().wall)
    full, works = OSError(28, "No space left on device"), log._writer.write
    for number, disk_is_full in enumerate([True, True, False, True]):
        refuse = Mock(side_effect=full) if disk_is_full else works
        monkeypatch.setattr(log._writer, "write", refuse)
        log.put([Clock(float(number))], float(number))
        log.write()
    line = "cannot write the telemetry log: No space left on device"
    assert caplog.messages == [line, line]


def test_what_is_resolved_is_over_for_everybody(node, hub, clock, stream, caplog):
    asks = DeviceSample(
        Device("GPU-1", 0, "H100"), clock.wall(), {("device_recovery_action", ()): 2}
    )
    hub.publish_device(asks)
    stream.step()
    (anomaly,) = reported(hub, "device_needs_service")
    clock.advance(5)
    assert stream.resolve(anomaly.id, "uid 0").end_time == clock.wall()
    stream.step()
    (closed,) = reported(hub, "device_needs_service")
    assert (closed.id, closed.end_time) == (anomaly.id, clock.wall())
    assert caplog.messages[-1] == (
        f"device_needs_service of GPU-1 ({anomaly.id}) was resolved by uid 0"
    )
