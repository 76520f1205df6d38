"""The pipeline's part in an anomaly's life: reported once, whatever restarts or fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import CaptureNode
from tests.daemon.state.counted import counted
from warpwatch_daemon.agent.pipeline import Pipeline
from warpwatch_daemon.agent.telemetry_log import TelemetryLog
from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.captures.triggers.decisions import Triggers
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.history.archive import Archive
from warpwatch_daemon.history.runs.run_files import RunFiles
from warpwatch_daemon.history.runs.run_table import RunTable
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_daemon.state.record_stream import RecordStream
from warpwatch_detection.detectors.deaths import Oom
from warpwatch_detection.engine import Detection
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import Record


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CaptureNode]:
    with ExitStack() as stack:
        yield CaptureNode(tmp_path, stack)


def pipeline(node: CaptureNode, hub: Hub, log: TelemetryLog | None = None) -> Pipeline:
    """A daemon's stream over the node's files, as a daemon's start makes it."""
    config = Config()
    detection = Detection(config.detection, config.anomalies)
    archive = Archive(node.store.path, detection, lambda what: None, lambda: None)
    triggers = Triggers(node.coordinator, node.source, hub)
    stream, runs = RecordStream(), RunTable(RunFiles(node.store.path), hub, "node")
    return Pipeline(
        hub, node.source, detection, node.coordinator, triggers, archive, stream, log, runs
    )


def raise_exception(node: CaptureNode) -> None:
    node.rings[1].event("exception", type="ValueError", message="no")


def reported(hub: Hub, kind: str) -> list[Anomaly]:
    return [anomaly for anomaly in hub.state().anomalies if anomaly.kind == kind]


def test_an_anomaly_is_counted_once_and_known_to_the_next_daemon_before_its_first_round(node):
    hub = Hub(10.0)
    first = pipeline(node, hub)
    first.step()
    raise_exception(node)
    first.step()
    (crash,) = reported(hub, "crash")
    assert counted(hub, "anomalies_total", "crash", "warning") == 1
    first.close()
    next_hub = Hub(10.0)
    second = pipeline(node, next_hub)
    assert reported(next_hub, "crash") == [crash]
    second.step()
    assert reported(next_hub, "crash") == [crash]
    assert counted(next_hub, "anomalies_total", "crash", "warning") is None


def test_what_a_detector_cannot_take_costs_no_other_record(node, monkeypatch):
    hub = Hub(10.0)
    stream = pipeline(node, hub)
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


def test_a_detector_that_fails_costs_no_other_detector_the_record(node, monkeypatch):
    def fail(self, seen):
        raise ZeroDivisionError("a detector's mistake")

    monkeypatch.setattr(Oom, "observe", fail)
    hub = Hub(10.0)
    stream = pipeline(node, hub)
    raise_exception(node)
    with pytest.raises(ZeroDivisionError):
        stream.step()
    assert len(reported(hub, "crash")) == 1
    assert (counted(hub, "detector_errors_total", "oom") or 0) >= 1
    stream.step()


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (Coordinator, "observe"),
        (Coordinator, "advance"),
        (Archive, "observe"),
        (Archive, "advance"),
        (Archive, "take"),
        (Triggers, "advance"),
        (RanksSource, "devices"),
    ],
)
def test_a_stage_that_fails_costs_no_other_stage_of_the_round(node, monkeypatch, stage, name):
    def fail(self, *args):
        raise ZeroDivisionError("a stage's mistake")

    hub = Hub(10.0)
    stream = pipeline(node, hub)
    stream.step()
    monkeypatch.setattr(stage, name, fail)
    raise_exception(node)
    with pytest.raises(ZeroDivisionError):
        stream.step()
    assert len(reported(hub, "crash")) == 1
    assert counted(hub, "anomalies_total", "crash", "warning") == 1
    monkeypatch.undo()
    stream.step()


def test_readings_are_of_every_detector(node):
    hub = Hub(10.0)
    stream = pipeline(node, hub)
    stream.step()
    statuses, suppressed = stream.detector_statuses()
    assert {"hang", "straggler", "thermal_throttle"} <= statuses.keys()
    assert suppressed == ()


def test_the_log_says_that_time_has_passed_where_nothing_arrives(node, tmp_path, monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.agent.telemetry_log.SILENCE_S", 0.0)
    path, hub = tmp_path / "telemetry.jsonl", Hub(10.0)
    log = TelemetryLog(JsonlWriter(path), hub.metrics)
    stream = pipeline(node, hub, log)
    node.rings[0].step()
    stream.step()
    stream.step()
    log.write()
    types = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert "step" in types[:-1]
    assert types[-1] == "clock"


def trained(node: CaptureNode, hub: Hub) -> Pipeline:
    """A pipeline that has read thirty steps of both ranks."""
    stream = pipeline(node, hub)
    for ring in node.rings * 30:
        ring.step()
    stream.step()
    return stream


def test_a_clock_that_is_set_is_reported_and_looks_like_no_hang(node, monkeypatch, caplog):
    hub = Hub(10.0)
    stream = trained(node, hub)
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 7200)
    stream.step()
    stream.step()
    assert reported(hub, "hang") == []
    assert "the clock was set, or the machine slept: 7200 s were skipped" in caplog.text


def test_silence_of_two_hours_is_a_hang(node, monkeypatch):
    hub = Hub(10.0)
    stream = trained(node, hub)
    true_time, true_monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: true_time() + 7200)
    monkeypatch.setattr(time, "monotonic", lambda: true_monotonic() + 7200)
    stream.step()
    assert [anomaly.kind for anomaly in reported(hub, "hang")] == ["hang"]
