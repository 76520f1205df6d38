"""The one capture of a healthy job, with a coordinator over real files."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import MANUAL, TRAIN, CaptureNode
from warpwatch_daemon.captures.triggers.baseline import BaselineCaptures
from warpwatch_daemon.config.triggers import BaselineConfig, TriggersConfig
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, Residual

EARLY = BaselineConfig(after_steps=3, after_s=60.0)
LEAK = Anomaly(
    id="a1",
    kind="memory_leak",
    time=0.0,
    severity="warning",
    summary="grows",
    rank=1,
    **TRAIN.fields(),
)
HOUR_S = 3600.0


class Node(CaptureNode):
    def __init__(
        self, path: Path, stack: ExitStack, baseline: BaselineConfig = EARLY, **options: Any
    ) -> None:
        super().__init__(path, stack, baseline=baseline, **options)
        self.now = time.time()
        self.baseline = BaselineCaptures(self.coordinator, self.hub)
        self.train(3)

    def train(self, steps: int) -> None:
        for ring in self.rings:
            for _ in range(steps):
                ring.step()
        self.poll()

    def look(self, after_s: float, *active: Anomaly) -> list[Capture]:
        """The baselines that were begun until then."""
        self.baseline.advance(self.now + after_s, active)
        captures = self.hub.state().captures
        return [c for c in captures if c.request.trigger == "baseline"]

    def complete(self, capture: Capture) -> Capture:
        for rank in capture.ranks:
            self.deliver(rank.rank)
        return self.finished(capture)

    def restart(self, config: TriggersConfig | None = None) -> None:
        super().restart(config)
        self.baseline = BaselineCaptures(self.coordinator, self.hub)
        self.poll()


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    return Node(tmp_path, stack)


def test_a_healthy_job_is_captured_once_on_its_first_rank(node: Node) -> None:
    assert node.look(30) == []
    (capture,) = node.look(90)
    assert [rank.rank for rank in capture.ranks] == [0]
    assert (capture.request.kind, capture.request.steps) == ("torch", 5)
    assert node.complete(capture).outcome == "complete"
    assert node.counted("complete", "baseline") == 1
    assert len(node.look(2 * HOUR_S)) == 1
    assert len(node.look(12 * HOUR_S)) == 1


def test_it_waits_for_the_steps(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, BaselineConfig(after_steps=6, after_s=60.0))
    assert node.look(90) == []
    node.train(3)
    assert len(node.look(93)) == 1


def test_it_can_be_switched_off(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, BaselineConfig(enabled=False, after_steps=0, after_s=0.0))
    assert node.look(90) == []


def test_a_job_that_is_not_well_is_no_baseline(node: Node) -> None:
    assert node.look(90, LEAK) == []
    # Whatever GPU another job says that it runs on.
    assert node.look(93, replace(LEAK, job="another", rank=0, device="GPU-0")) != []


def test_nor_is_one_whose_device_is_not(node: Node) -> None:
    hot = Anomaly(
        id="a2", kind="overheating", time=0.0, severity="warning", summary="92 °C", device="GPU-1"
    )
    assert node.look(90, hot) == []


def test_a_restart_of_the_daemon_or_of_the_ranks_takes_no_second_one(node: Node) -> None:
    (capture,) = node.look(90)
    node.complete(capture)
    node.restart()
    assert len(node.look(HOUR_S)) == 1
    for number in (0, 1):
        node.holders[number].kill()
        node.holders[number].wait()
    node.poll()
    for number in (0, 1):
        node.join(number)
    node.train(5)
    assert len(node.look(3 * HOUR_S)) == 1


@pytest.mark.parametrize(("run", "taken"), [("r1", 0), ("r0", 1)])
def test_another_run_of_the_job_has_a_baseline_of_its_own(node: Node, run: str, taken: int) -> None:
    capture = node.complete(node.look(90)[0])
    node.store.save(replace(capture, request=replace(capture.request, run=run)))
    node.restart()
    assert len(node.look(30 * HOUR_S)) == 1 + taken


def test_an_interrupted_one_is_tried_once_more(node: Node) -> None:
    for tries in (1, 2, 2):
        captures = node.look(tries * 2 * HOUR_S)
        assert len(captures) == tries
        node.answer(0, "capture_failed", detail="interrupted: a checkpoint began")
        node.finished(captures[-1])
        node.baseline = BaselineCaptures(node.coordinator, node.hub)
    assert len(node.look(8 * HOUR_S)) == 2


def test_a_busy_job_is_left_alone(node: Node) -> None:
    node.coordinator.request(MANUAL)
    assert node.look(90) == []
    assert node.counted("refused_busy", "baseline") == 0


def test_a_refusal_is_counted_and_asked_again_after_a_while(
    tmp_path: Path, stack: ExitStack
) -> None:
    node = Node(tmp_path, stack, quiet_hours=("00:00-24:00",))
    for after_s in (90, 100, 200):
        assert node.look(after_s) == []
    assert node.counted("refused_quiet_hours", "baseline") == 1
    node.coordinator.policy.config = TriggersConfig(baseline=EARLY)
    assert node.look(500) == []
    assert len(node.look(700)) == 1


def test_a_dry_run_counts_it_once(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, dry_run=True)
    for after_s in (90, HOUR_S, 2 * HOUR_S):
        assert node.look(after_s) == []
    assert node.counted("refused_dry_run", "baseline") == 1


@pytest.mark.parametrize(("ranks", "taken"), [((0, 1), [0]), ((2, 3), None)])
def test_on_many_nodes_it_is_taken_where_rank_0_is(
    tmp_path: Path, stack: ExitStack, ranks: tuple[int, int], taken: list[int] | None
) -> None:
    node = Node(tmp_path, stack, ranks=ranks, world_size=4)
    captures = node.look(90)
    assert [rank.rank for c in captures for rank in c.ranks] == (taken or [])


@pytest.mark.parametrize(("trigger", "taken"), [("baseline", 0), ("manual", 1)])
def test_where_the_newest_one_left_its_job_slower_no_other_is_taken(
    node: Node, trigger: str, taken: int
) -> None:
    capture = node.complete(node.coordinator.request(MANUAL))
    request = replace(MANUAL, job="another", trigger=trigger)
    node.store.save(replace(capture, request=request, residual=Residual(1.2, 20, slower=True)))
    node.restart()
    for after_s in (90, HOUR_S):
        mine = [c for c in node.look(after_s) if c.request.job == "train"]
        assert len(mine) == taken
    assert node.counted("refused_disabled", "baseline") == 1 - taken


def test_a_later_capture_of_the_job_is_compared_with_it(node: Node) -> None:
    (baseline,) = node.look(90)
    assert node.complete(baseline).baseline_id is None
    later = node.complete(node.coordinator.request(MANUAL))
    assert (later.baseline_id, later.diagnosis_outcome) == (baseline.id, "ok")
    node.restart()
    assert node.capture(later).baseline_id == baseline.id


def test_what_a_schedule_takes_is_compared_with_the_last_one_that_was_good(node: Node) -> None:
    (baseline,) = node.look(90)
    node.complete(baseline)
    asked = replace(MANUAL, trigger="schedule")
    first = node.complete(node.coordinator.request(asked))
    second = node.complete(node.coordinator.request(asked))
    assert (first.baseline_id, second.baseline_id) == (baseline.id, first.id)


def test_a_baseline_that_cannot_be_read_costs_no_diagnosis(node: Node) -> None:
    (baseline,) = node.look(90)
    stored = node.complete(baseline)
    (Path(str(stored.folder)) / "rank0.pt.trace.json.gz").write_bytes(b"garbage")
    later = node.complete(node.coordinator.request(MANUAL))
    assert (later.baseline_id, later.diagnosis_outcome) == (None, "ok")


def test_retention_spares_the_baseline_of_a_job_that_runs(node: Node) -> None:
    (capture,) = node.look(90)
    baseline = node.complete(capture)
    later = [node.complete(node.coordinator.request(MANUAL)) for _ in range(3)]
    node.store.config = type(node.store.config)(url=node.store.config.url, max_captures=2)
    node.coordinator.retain()
    assert [kept.id for kept in node.hub.state().captures] == [baseline.id, later[-1].id]


def test_a_run_slower_than_those_before_is_compared_with_their_baseline(node: Node) -> None:
    def taken(number: int, run: str, **changes: Any) -> None:
        fields: dict[str, Any] = {**TRAIN._replace(run=run).fields(), **changes}
        asked = replace(MANUAL, **fields)
        at, name = node.now - 100 + number, f"c{number}"
        folder = str(node.store.folder(name, at))
        node.store.create(Capture(name, asked, at, folder=folder, outcome="complete"))

    taken(1, "r-1", trigger="baseline")
    taken(2, "r-2", trigger="baseline")
    taken(3, "r-2", trigger="anomaly", anomaly_kind="run_regression")
    taken(4, TRAIN.run, trigger="baseline")
    taken(5, "r-3", trigger="baseline", job="another")
    node.restart()
    found = node.coordinator.register.earlier_baseline(TRAIN, node.now)
    assert found is not None
    assert found.id == "c1"
