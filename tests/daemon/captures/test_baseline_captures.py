"""The one capture of a healthy job, with a service over real files."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import MANUAL, CaptureNode, anomaly
from warpwatch_capturing.config import BaselineConfig, TriggersConfig
from warpwatch_capturing.regular import Baseline, RegularCaptures
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture

EARLY = BaselineConfig(after_steps=3, after_s=60.0)
LEAK = anomaly("memory_leak", rank=1)
HOUR_S = 3600.0


class Node(CaptureNode):
    def __init__(self, path: Path, stack: ExitStack, **options: Any) -> None:
        super().__init__(path, stack, baseline=EARLY, **options)
        self.train(3)

    def connect(self) -> None:
        self.baseline = RegularCaptures(Baseline(self.service, self.hub), self.service)
        self.poll()

    def train(self, steps: int) -> None:
        for ring in self.rings:
            ring.steps_of(steps)
        self.poll()

    def look(self, after_s: float, *active: Anomaly) -> list[Capture]:
        self.baseline.advance(self.now + after_s, active)
        return [c for c in self.captures if c.request.trigger == "baseline"]

    def taken(self) -> Capture:
        return self.complete(self.look(90)[0])


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    return Node(tmp_path, stack)


def test_a_healthy_job_is_captured_once_on_its_first_rank(node):
    assert node.look(59) == []
    (capture,) = node.look(61)
    assert [rank.rank for rank in capture.ranks] == [0]
    assert (capture.request.kind, capture.request.steps) == ("torch", 5)
    assert node.complete(capture).outcome == "complete"
    assert node.counted("complete", "baseline") == 1
    assert len(node.look(2 * HOUR_S)) == len(node.look(12 * HOUR_S)) == 1


def test_a_job_with_an_anomaly_has_no_baseline(node):
    assert node.look(90, LEAK) == []


def test_a_restart_of_the_daemon_or_of_the_ranks_takes_no_second_one(node):
    node.taken()
    node.restart()
    assert len(node.look(HOUR_S)) == 1
    node.kill(0, 1)
    node.poll()
    for number in (0, 1):
        node.join(number)
    node.train(5)
    assert len(node.look(3 * HOUR_S)) == 1


@pytest.mark.parametrize(("run", "taken"), [("r1", 0), ("r0", 1)])
def test_another_run_of_the_job_has_a_baseline_of_its_own(node, run, taken):
    capture = node.taken()
    node.store.save(replace(capture, request=replace(capture.request, run=run)))
    node.restart()
    assert len(node.look(30 * HOUR_S)) == 1 + taken


def test_a_clock_that_was_set_back_is_no_reason_to_wait(node):
    assert node.look(HOUR_S, LEAK) == []
    assert len(node.look(90)) == 1


def test_a_refusal_is_counted_and_asked_again_after_ten_minutes(node):
    node.service.policy.config = TriggersConfig(baseline=EARLY, quiet_hours=("00:00-24:00",))
    for after_s in (90, 100, 200):
        assert node.look(after_s) == []
    assert node.counted("refused_quiet_hours", "baseline") == 1
    node.service.policy.config = TriggersConfig(baseline=EARLY)
    assert node.look(689) == []
    assert len(node.look(691)) == 1


@pytest.mark.parametrize(
    ("busy", "options", "refused"), [(True, {}, 0), (False, {"dry_run": True}, 1)]
)
def test_a_busy_job_is_left_alone_and_a_dry_run_counted_once_a_day(
    tmp_path, stack, busy, options, refused
):
    node = Node(tmp_path, stack, **options)
    if busy:
        node.service.request(MANUAL)
    # A dry run is asked again after a day.
    for after_s, times in ((90, 1), (HOUR_S, 1), (24 * HOUR_S + 89, 1), (24 * HOUR_S + 91, 2)):
        assert node.look(after_s) == []
        counts = [node.counted(f"refused_{why}", "baseline") for why in ("busy", "dry_run")]
        assert counts == [0, refused * times]


def test_a_later_capture_of_the_job_is_compared_with_it(node):
    baseline = node.taken()
    later = node.captured()
    assert baseline.baseline_id is None
    assert (later.baseline_id, later.diagnosis_outcome) == (baseline.id, "ok")
    # Scheduled captures are compared with the last good one.
    asked = replace(MANUAL, trigger="schedule")
    first, second = node.captured(asked), node.captured(asked)
    assert (first.baseline_id, second.baseline_id) == (baseline.id, first.id)
    node.restart()
    assert node.capture(later).baseline_id == baseline.id


def test_a_baseline_that_cannot_be_read_costs_no_diagnosis(node):
    stored = node.taken()
    (Path(str(stored.folder)) / "rank0.pt.trace.json.gz").write_bytes(b"garbage")
    later = node.captured()
    assert (later.baseline_id, later.diagnosis_outcome) == (None, "ok")


def test_retention_spares_the_baseline_of_a_job_that_runs(node):
    baseline = node.taken()
    later = [node.captured() for _ in range(2)]
    node.store.config = type(node.store.config)(url=node.store.config.url, max_captures=2)
    node.service.retain()
    assert [kept.id for kept in node.captures] == [baseline.id, later[-1].id]
