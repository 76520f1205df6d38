"""The pipeline's part in an anomaly's life: reported once, over restarts and failures."""

import json
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.daemon.captures.capture_node import CaptureNode
from tests.daemon.state.counted import counted
from tests.waiting import DEADLINE_S
from warpwatch_capturing.regular import Baseline, RegularCaptures
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.triggers import Triggers
from warpwatch_daemon.agent.pipeline import Pipeline, TelemetryLog
from warpwatch_daemon.config import Config
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_daemon.history.archive import Archive
from warpwatch_daemon.history.runs import RunFiles, RunTable
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_detection.detectors.deaths import Oom
from warpwatch_detection.engine import Detection
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import Clock
from warpwatch_telemetry.samples import Device, DeviceSample


class Node(CaptureNode):
    """A node with its daemon's pipeline and telemetry log."""

    def connect(self) -> None:
        config, hub, service, store = Config(), self.hub, self.service, self.store.path
        detection = Detection(config.detection, config.anomalies)
        self.log = TelemetryLog(JsonlWriter(store.with_name("log")), hub.metrics, self.clock.wall)
        self.pipeline = Pipeline(
            hub,
            self.source,
            detection,
            service,
            Triggers(service, self.source.targets, hub),
            RegularCaptures(Baseline(service, hub), service),
            Archive(store, detection, lambda what: None, lambda: None),
            RecordStream(),
            self.log,
            RunTable(RunFiles(store), hub, "node"),
            self.clock.monotonic,
            self.clock.wall,
        )

    def raise_exception(self) -> None:
        self.rings[1].event("exception", type="ValueError", message="no")

    def reported(self, kind: str) -> list[Anomaly]:
        return [anomaly for anomaly in self.hub.state().anomalies if anomaly.kind == kind]


@pytest.fixture
def node(tmp_path, stack):
    return Node(tmp_path, stack)


@pytest.mark.parametrize("with_fleet", [False, True])
def test_an_anomaly_is_counted_once_and_known_to_the_next_daemon_before_its_first_round(
    node, with_fleet
):
    node.pipeline.step()
    if with_fleet:
        # The fleet has opened it and is away.
        job = node.hub.ranks()[0].job_id
        node.pipeline.leases.acquire(job, "fleet", 0.0, {"crash": "9-f"})
    node.raise_exception()
    node.pipeline.step()
    (crash,) = node.reported("crash")
    assert b'"anomaly"' in node.pipeline._stream.live()[-1][1]
    assert (crash.id == "9-f") == with_fleet
    assert counted(node.hub, "anomalies_total", "crash", "warning") == (not with_fleet or None)
    node.pipeline.close()
    node.restart()
    assert node.reported("crash") == [crash]
    assert [change.anomaly for change in node.pipeline._changes] == [crash]
    assert b'"anomaly"' in node.pipeline._stream.live()[-1][1]
    node.pipeline.step()
    assert (node.reported("crash"), node.pipeline._changes) == ([crash], [])
    assert counted(node.hub, "anomalies_total", "crash", "warning") is None


def test_a_disk_that_hangs_does_not_keep_the_daemon_from_its_end(node, monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.agent.pipeline.CLOSE_TIMEOUT_S", 0.01)
    answers = threading.Event()
    waited = list[bool]()
    monkeypatch.setattr(Archive, "finish", lambda _: waited.append(answers.wait(DEADLINE_S)))
    node.pipeline.close()
    assert waited == []
    answers.set()
    # Nor does a round that hangs.
    with node.pipeline._owner:
        node.pipeline.close()


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (CaptureService, "observe"), (CaptureService, "advance"), (Archive, "observe"),
        (Archive, "advance"), (Archive, "note_change"), (Triggers, "advance"),
        (RanksSource, "devices"), (Detection, "feed"), (Oom, "observe"), (RunTable, "observe"),
        (RunTable, "advance"), (RunTable, "note_change"),
    ],
)  # fmt: skip
def test_a_stage_or_detector_that_fails_costs_no_other_one_and_no_other_record(
    node, monkeypatch, stage, name
):
    works, failed = getattr(stage, name), list[object]()

    def fail_once(self, *args):
        if not failed:
            failed.append(args)
            raise ZeroDivisionError("a mistake")
        return works(self, *args)

    monkeypatch.setattr(stage, name, fail_once)
    node.restart()
    node.rings[0].step()
    node.raise_exception()
    with pytest.raises(ZeroDivisionError):
        node.pipeline.step()
    assert len(node.reported("crash")) == 1
    assert counted(node.hub, "anomalies_total", "crash", "warning") == 1
    errors = counted(node.hub, "detector_errors_total", "oom") or 0
    assert (errors > 0) is (stage is Oom)
    node.pipeline.step()


def test_the_log_says_after_five_seconds_of_silence_that_time_has_passed(node):
    for ring in node.rings * 2:
        ring.step()
    node.pipeline.step()
    for later_s in (4.9, 0.2, 4.8):
        node.clock.advance(later_s)
        node.pipeline.step()
    node.log.write()
    lines = node.store.path.with_name("log").read_text().splitlines()
    types = [json.loads(line)["type"] for line in lines]
    # Steps of the same time go by number.
    numbers = [one["step"] for one in map(json.loads, lines) if one["type"] == "step"]
    assert numbers == sorted(numbers) and len(numbers) >= 4
    assert "step" in types and types.count("clock") == 1
    assert types[-1] == "clock"
    assert counted(node.hub, "jsonl_records_total") == len(types)


@pytest.mark.parametrize("what", ["the clock was set", "the agent was stopped", "silence"])
def test_two_hours_of_silence_are_a_hang_unless_nothing_was_read_meanwhile(node, caplog, what):
    node.pipeline.step()
    for ring in node.rings * 30:
        ring.step()
    node.pipeline.step()
    if what == "the clock was set":
        node.clock.set_wall(node.clock.wall() + 7200.0)
    elif what == "the agent was stopped":
        node.clock.advance(7200.0)
    else:
        node.clock.set_wall(node.clock.wall() - 60.0)
        for _ in range(1440):
            node.clock.advance(5.0)
            node.pipeline.step()
    if what != "silence":
        # The ring keeps only the newest steps.
        for ring in node.rings * 3000:
            ring.step()
    node.pipeline.step()
    node.pipeline.step()
    assert [one.kind for one in node.reported("hang")] == ["hang"] * (what == "silence")
    leap = "the clock was set, or the machine or this agent stood still: 7200 s were skipped"
    assert (leap in caplog.text) is ("skipped" in caplog.text) is (what != "silence")


def test_records_wait_in_memory_only_as_long_as_there_is_a_bound(node):
    for count in (200_000, 1, 1, 1):
        node.log.put([Clock(1.0)] * count, 1.0)
    node.log.write()
    assert counted(node.hub, "jsonl_errors_total") == 2
    assert counted(node.hub, "jsonl_records_total") == 200_001


def test_a_full_disk_is_logged_again_after_it_had_room(node, monkeypatch, caplog):
    full, works = OSError(28, "No space left on device"), node.log._writer.write
    for number, disk_is_full in enumerate([True, None, True, False, True]):
        refuse = Mock(side_effect=full) if disk_is_full else works
        monkeypatch.setattr(node.log._writer, "write", refuse)
        # A round without records is not a success.
        if disk_is_full is not None:
            node.log.put([Clock(float(number))], float(number))
        node.log.write()
    line = "cannot write the telemetry log: No space left on device"
    assert caplog.messages == [line, line]
    assert counted(node.hub, "jsonl_errors_total") == 3


def test_what_is_resolved_is_over_for_everybody(node, caplog):
    action: dict[SeriesKey, float] = {("device_recovery_action", ()): 2}
    node.hub.publish_device(DeviceSample(Device("GPU-1", 0, "H100"), node.clock.wall(), action))
    node.pipeline.step()
    (anomaly,) = node.reported("device_needs_service")
    node.clock.advance(5)
    assert node.pipeline.resolve(anomaly.id, "uid 0").end_time == node.clock.wall()
    node.pipeline.step()
    assert not any(b'"anomaly"' in line for _, line in node.pipeline._stream.live())
    assert node.pipeline._resolved == []
    (closed,) = node.reported("device_needs_service")
    assert (closed.id, closed.end_time) == (anomaly.id, node.clock.wall())
    assert caplog.messages[-1] == (
        f"device_needs_service of GPU-1 ({anomaly.id}) was resolved by uid 0"
    )
    caplog.set_level("INFO")
    for severity, level in (("info", "INFO"), ("critical", "WARNING")):
        node.pipeline._report(replace(closed, severity=severity))
        assert caplog.records[-1].levelname == level


def test_a_rendezvous_that_cannot_be_read_is_a_source_that_is_down(node, monkeypatch, caplog):
    error, found, works = OSError(5, "I/O error", "/run"), list[object](), node.source.poll
    node.hub.readings_dropped = 7
    for is_down in (True, True, False, True):
        poll = Mock(side_effect=error) if is_down else works
        monkeypatch.setattr(node.source, "poll", poll)
        node.pipeline.step()
        found += [(one.up, one.reason, one.errors) for one in node.hub.health()]
    reason = "I/O error: /run"
    assert found == [(False, reason, 1), (False, reason, 2), (True, "", 2), (False, reason, 3)]
    assert [one[:27] for one in caplog.messages] == ["cannot read the rendezvous:"] * 2
    monkeypatch.setattr(node.source, "poll", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        node.pipeline.step()
    assert counted(node.hub, "detection_refused_total", "readings") == 7


def test_captures_are_asked_for_what_is_this_nodes_to_judge(node, monkeypatch):
    asked = list[object]()

    def advance(self, now, changes, active):
        asked.append([len(list(changes)), len(list(active))])

    monkeypatch.setattr(Triggers, "advance", advance)
    node.pipeline.step()
    job = node.hub.ranks()[0].job_id
    node.pipeline.leases.acquire(job, "fleet", 60.0)
    node.raise_exception()
    for later_s in (0.0, 61.0, 0.0):
        node.clock.advance(later_s)
        node.pipeline.step()
    assert asked == [[0, 0], [0, 0], [1, 1], [0, 1]]
