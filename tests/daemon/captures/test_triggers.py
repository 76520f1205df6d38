"""Triggers of anomalies, with a service over real files."""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.daemon.captures.capture_node import AUTOMATIC, MANUAL, TRAIN, CaptureNode, anomaly
from tests.daemon.state.counted import counted
from warpwatch_capturing.config import RecipeConfig, TriggersConfig
from warpwatch_capturing.triggers import Triggers
from warpwatch_detection.anomalies.register import Change
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, Decision
from warpwatch_telemetry.jobs import whose
from warpwatch_telemetry.sections import AnomalyKind

# Their times count from the node's start.
REGRESSION = anomaly("step_regression")
STRAGGLER = anomaly("straggler", rank=1, device="GPU-1")
# An anomaly of a device without a known job.
HOT = anomaly("overheating", device="GPU-3", owner="", job=None, run="")
CULPRIT = RecipeConfig(ranks="culprit")
CASES = cases(__file__)
ALL_DAY = TriggersConfig(quiet_hours=("00:00-24:00",))
INTERRUPTED = "interrupted: an evaluation began"


class Node(CaptureNode):
    def __init__(self, path: Path, stack: ExitStack, **options: Any) -> None:
        self.active: dict[str, Anomaly] = {}
        super().__init__(path, stack, **options)

    def connect(self) -> None:
        self.triggers = Triggers(self.service, self.source.targets, self.hub)

    def reload(self, config: TriggersConfig) -> None:
        self.service.policy.config = config

    def see(self, *active: Anomaly, after_s: float = 0.0) -> None:
        before = self.active
        self.active = {one.id: replace(one, time=self.now + one.time) for one in active}
        now = self.now + after_s
        over = [replace(before[ident], end_time=now) for ident in before.keys() - self.active]
        changes = [Change("closed", anomaly) for anomaly in over]
        changes += [Change("updated", anomaly) for anomaly in self.active.values()]
        self.triggers.advance(now, changes, list(self.active.values()))

    def decision(self, anomaly_id: str = "a1") -> Decision:
        return next(d for d in self.hub.state().decisions if d.anomaly_id == anomaly_id)

    def outcome(self, anomaly_id: str = "a1") -> str:
        return self.decision(anomaly_id).outcome

    def fail(self, detail: str) -> Capture:
        self.answer_all("capture_failed", detail=detail)
        return self.finished(self.captures[-1])


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    return Node(tmp_path, stack)


@pytest.fixture
def four(tmp_path: Path, stack: ExitStack) -> Node:
    return Node(tmp_path, stack, ranks=(0, 1, 2, 3))


def test_a_slow_rank_is_captured_beside_its_nearest_peer(four):
    four.see(replace(STRAGGLER, rank=2, device="GPU-2"))
    (capture,) = four.captures
    assert [rank.rank for rank in capture.ranks] == [1, 2]
    assert four.command(1) == four.command(2)
    request = capture.request
    assert (request.kind, request.steps) == ("torch", 5)
    assert (request.anomaly_kind, request.reason) == ("straggler", "rank 1 is slow")
    assert (four.outcome(), four.decision().capture_id) == ("captured", capture.id)


def test_a_peer_is_well_itself_and_so_is_its_device(four):
    slow = replace(STRAGGLER, rank=2, device="GPU-2")
    stall = replace(STRAGGLER, id="a2", kind="data_stall", rank=1, device=None)
    hot = replace(HOT, id="a3")
    next(rank for rank in four.source.live() if rank.rank == 0).status = "stopped"
    # The slow rank is captured alone, and stacks do not wait for what runs.
    four.see(slow, stall, hot)
    four.see(slow, stall, hot, replace(slow, kind="hang", id="a4"))
    found = [(one.request.kind, [rank.rank for rank in one.ranks]) for one in four.captures]
    assert found == [("torch", [2]), ("torch", [1]), ("stacks", [0, 1, 2, 3])]


@pytest.mark.parametrize(("about", "kind", "ranks"), CASES["recipes"])
def test_a_kind_has_its_recipe(node, about, kind, ranks):
    node.see(replace(STRAGGLER, **about))
    found = [(one.request.kind, [rank.rank for rank in one.ranks]) for one in node.captures]
    assert found == [(kind, ranks)]
    assert node.captures[0].request.steps == (20 if kind == "memory" else 5)
    assert node.outcome() == "captured"


def test_python_stacks_are_recorded_when_the_same_comes_back(node):
    node.see(STRAGGLER)
    assert node.captures[0].request.options == ()
    assert node.complete().outcome == "complete"
    node.clock.advance(601)
    node.see(replace(STRAGGLER, id="a2", time=700.0), after_s=700)
    assert node.captures[1].request.options == ("stacks",)
    assert node.command(1)["options"] == ["stacks"]


@pytest.mark.parametrize(("about", "options", "decided"), CASES["not_captured"])
def test_what_is_not_captured_is_shown_with_its_reason_and_counted(
    tmp_path, stack, about, options, decided
):
    node = Node(tmp_path, stack, **options)
    for _ in range(3):
        node.see(replace(STRAGGLER, **about))
    found = node.decision()
    assert re.fullmatch(decided, f"{found.outcome}: {found.detail}")
    assert node.captures == ()
    assert node.counted(found.outcome, "anomaly") == (found.outcome != "no_recipe")


def test_the_newest_thousand_decisions_are_kept(node):
    node.see(*(replace(STRAGGLER, kind="crash", id=f"c{number}") for number in range(1001)))
    decided = [decision.anomaly_id for decision in node.hub.state().decisions]
    assert decided == [f"c{number}" for number in range(1, 1001)]


def test_a_refusal_is_counted_once_though_it_ends_and_is_opened_again(node):
    node.see(STRAGGLER)
    node.complete()
    for _ in range(3):
        node.see(replace(STRAGGLER, id="a2"))
    assert "triggers.cooldown_s leaves" in node.decision("a2").detail
    node.see()
    assert node.outcome("a2") == "refused_cooldown"
    node.see(replace(STRAGGLER, id="a2"))
    assert node.counted("refused_cooldown", "anomaly") == 1
    assert node.counted("refused_over", "anomaly") == 0


def test_a_busy_rank_is_waited_for(node):
    manual = node.service.request(MANUAL)
    for _ in range(2):
        node.see(STRAGGLER)
        assert (node.outcome(), len(node.captures)) == ("waiting", 1)
    node.complete()
    node.see(STRAGGLER)
    assert node.captures[-1].id != manual.id
    decided = node.decision()
    assert (decided.outcome, decided.time) == ("captured", node.captures[-1].time)
    assert node.counted("refused_busy", "anomaly") == 1


def test_what_is_over_before_its_ranks_are_free_is_counted_and_not_captured(node):
    node.service.request(MANUAL)
    node.see(STRAGGLER)
    node.see()
    node.complete()
    node.see()
    assert node.outcome() == "refused_over"
    about = ("torch", "anomaly", "refused_over", *whose(TRAIN.owner))
    assert counted(node.hub, "captures_total", *about) == 1
    assert len(node.captures) == 1


def test_what_lasts_longer_than_quiet_hours_is_captured_after_them(node):
    node.reload(ALL_DAY)
    for after_s in range(0, 3600, 30):
        node.see(STRAGGLER, after_s=after_s)
    assert node.outcome() == "refused_quiet_hours"
    assert node.counted("refused_quiet_hours", "anomaly") == 1
    # Another refusal of the same anomaly is counted too.
    node.reload(TriggersConfig(captures_per_hour=0))
    for after_s in (3600, 3660, 3720):
        node.see(STRAGGLER, after_s=after_s)
    assert node.outcome() == "refused_budget"
    assert node.counted("refused_budget", "anomaly") == 1
    node.reload(TriggersConfig())
    node.see(STRAGGLER, after_s=3780)
    assert node.outcome() == "captured"
    node.complete()
    node.see(STRAGGLER, after_s=7200)
    assert len(node.captures) == 1


def test_what_the_store_had_no_room_for_is_asked_for_again(node):
    away = node.store.path.with_name("away")
    node.store.path.rename(away)
    for after_s in (0, 1, 61, 62):
        node.see(STRAGGLER, after_s=after_s)
        node.service.finish()
    assert node.outcome() == "refused_disk"
    assert node.counted("refused_disk", "anomaly") == 1
    assert len(node.captures) == 2
    away.rename(node.store.path)
    # A refusal does not count as a try: an interrupted capture is repeated.
    for after_s, captures in ((122, 3), (183, 4)):
        node.see(STRAGGLER, after_s=after_s)
        node.service.finish()
        assert (node.outcome(), len(node.captures)) == ("captured", captures)
        node.fail(INTERRUPTED)


@pytest.mark.parametrize("by_older_version", [False, True])
def test_what_was_refused_before_a_restart_is_asked_for_again_and_the_newest_ten_are_kept(
    node, by_older_version
):
    for number in range(12):
        capture = Capture(f"20261121T2000{number:02d}-aa", AUTOMATIC, node.now + number)
        register = node.service.register
        register.keep(register.with_folder(capture))
        started = register.create(capture.id)
        if not by_older_version:
            register.refuse(replace(started, outcome="refused_idle"))
        register.update(capture.id, outcome="refused_idle")
    node.restart()
    assert len(node.store.folders()) == 10
    assert [one.id[13:15] for one in node.captures] == [f"{number:02d}" for number in range(2, 12)]
    node.see(STRAGGLER)
    assert (node.decision().capture_id, len(node.captures)) == (node.captures[-1].id, 11)


def test_an_event_is_not_captured_hours_after_it(node):
    recipes: dict[AnomalyKind, RecipeConfig | None] = {"xid": CULPRIT}
    node.reload(ALL_DAY.model_copy(update={"recipes": recipes}))
    event = replace(STRAGGLER, kind="xid")
    node.see(event)
    node.reload(TriggersConfig(recipes=recipes))
    node.see(event, after_s=3600)
    assert node.outcome() == "refused_quiet_hours"
    assert node.captures == ()


def test_an_interrupted_capture_is_repeated_once_whatever_the_cooldown(node):
    node.see(STRAGGLER)
    assert node.fail(INTERRUPTED).outcome == "failed"
    # It waits for the end of quiet hours.
    node.reload(ALL_DAY)
    node.see(STRAGGLER, after_s=1)
    assert node.outcome() == "refused_quiet_hours"
    node.reload(TriggersConfig())
    node.see(STRAGGLER, after_s=61)
    assert len(node.captures) == 2
    assert node.fail(INTERRUPTED).outcome == "failed"
    for _ in range(3):
        node.see(STRAGGLER, after_s=200)
    assert len(node.captures) == 2
    assert node.decision().capture_id == node.captures[1].id


@pytest.mark.parametrize(("max_tries", "detail"), [(1, INTERRUPTED), (2, "no_space")])
def test_a_capture_that_may_be_tried_once_or_failed_otherwise_is_not_repeated(
    node, max_tries, detail
):
    node.triggers = Triggers(node.service, node.source.targets, node.hub, max_tries)
    node.see(STRAGGLER)
    assert node.fail(detail).outcome == "failed"
    node.see(STRAGGLER, after_s=200)
    assert len(node.captures) == 1


def test_a_capture_without_the_culprit_is_repeated_when_it_is_back(node):
    node.see(STRAGGLER)
    node.kill(1)
    node.deliver(0)
    assert node.finished(node.captures[0]).outcome == "partial"
    node.see(STRAGGLER)
    assert (node.outcome(), node.decision().capture_id) == ("waiting", node.captures[0].id)
    assert "rank 1: the process died before it answered" in node.decision().detail
    assert len(node.captures) == 1
    node.join(1)
    node.see(STRAGGLER)
    assert len(node.captures) == 2


def test_a_restart_captures_nothing_twice(node):
    node.see(STRAGGLER)
    capture = node.complete()
    node.restart()
    node.see(STRAGGLER)
    assert [known.id for known in node.captures] == [capture.id]
    assert (node.outcome(), node.decision().capture_id) == ("captured", capture.id)


def test_what_a_restart_has_interrupted_is_captured_again_once(node):
    node.see(STRAGGLER)
    node.restart()
    assert node.captures[0].detail == "interrupted: the daemon ended meanwhile"
    assert node.captures[0].end_time is not None
    assert node.counted("failed", "anomaly") == 1
    for _ in range(2):
        node.see(STRAGGLER)
        assert len(node.captures) == 2
        node.restart()


def test_a_rank_of_another_node_is_no_peer(tmp_path, stack):
    node = Node(tmp_path, stack, ranks=(2, 3), world_size=4)
    node.see(replace(STRAGGLER, rank=3))
    assert [rank.rank for rank in node.captures[0].ranks] == [2, 3]


def test_waiting_for_others_must_outlast_another_nodes_capture(tmp_path, stack):
    node = Node(tmp_path, stack, ranks=(0, 1), world_size=4)
    node.see(REGRESSION, after_s=1)
    node.see(REGRESSION, after_s=59)
    detail = "whether it lasts 60 s: it may be another node's capture"
    assert (node.outcome(), node.decision().detail) == ("waiting", detail)
    assert node.captures == ()
    node.see(after_s=59.5)
    node.see(after_s=90)
    assert (node.outcome(), node.captures) == ("refused_over", ())
    node.see(replace(REGRESSION, id="a2", time=100.0), after_s=160)
    node.see(replace(REGRESSION, id="a2", time=100.0), after_s=161)
    assert node.outcome("a2") == "captured"
