"""What becomes of an anomaly's trigger, with a coordinator over real files."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import MANUAL, TRAIN, CaptureNode
from warpwatch_daemon.captures.triggers.decisions import Triggers, is_interrupted
from warpwatch_daemon.captures.triggers.recipes import healthy_peer
from warpwatch_daemon.config.triggers import RecipeConfig, TriggersConfig
from warpwatch_detection.anomalies.changes import Change
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, Decision, RankCapture
from warpwatch_telemetry.sections import AnomalyKind

# Their times count from the node's start.
STRAGGLER = Anomaly(
    id="a1",
    kind="straggler",
    time=0.0,
    severity="warning",
    summary="rank 1 is slow",
    **TRAIN.fields(),
    rank=1,
    device="GPU-1",
)
REGRESSION = Anomaly(
    id="a1",
    kind="step_regression",
    time=0.0,
    severity="warning",
    summary="steps got slower",
    **TRAIN.fields(),
)


class Node(CaptureNode):
    """With its triggers, and what was decided."""

    def __init__(self, path: Path, stack: ExitStack, **options: Any) -> None:
        super().__init__(path, stack, **options)
        self.now = time.time()
        self.triggers = Triggers(self.coordinator, self.source, self.hub)
        self.active: dict[str, Anomaly] = {}

    def restart(self, config: TriggersConfig | None = None) -> None:
        super().restart(config)
        self.triggers = Triggers(self.coordinator, self.source, self.hub)

    def see(self, *active: Anomaly, after_s: float = 0.0) -> None:
        """These anomalies are active now, and no others."""
        before = self.active
        self.active = {one.id: replace(one, time=self.now + one.time) for one in active}
        now = self.now + after_s
        over = [replace(before[ident], end_time=now) for ident in before.keys() - self.active]
        changes = [Change("closed", anomaly) for anomaly in over]
        changes += [Change("updated", anomaly) for anomaly in self.active.values()]
        self.triggers.advance(now, changes, list(self.active.values()))

    def decision(self, anomaly_id: str = "a1") -> Decision:
        return next(d for d in self.hub.state().decisions if d.anomaly_id == anomaly_id)

    @property
    def captures(self) -> tuple[Capture, ...]:
        return self.hub.state().captures

    def complete(self) -> Capture:
        """The newest capture, after its ranks have brought what was asked for."""
        capture = self.captures[-1]
        for rank in capture.ranks:
            self.deliver([ring.rank for ring in self.rings].index(rank.rank))
        return self.finished(capture)


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    return Node(tmp_path, stack)


def four(tmp_path: Path, stack: ExitStack, **options: Any) -> Node:
    return Node(tmp_path, stack, ranks=(0, 1, 2, 3), **options)


# --- what is captured ---


def test_a_slow_rank_is_captured_beside_its_nearest_peer(tmp_path: Path, stack: ExitStack) -> None:
    node = four(tmp_path, stack)
    node.see(replace(STRAGGLER, rank=2, device="GPU-2"))
    (capture,) = node.captures
    assert [rank.rank for rank in capture.ranks] == [1, 2]
    assert node.command(1) == node.command(2)
    assert (capture.request.kind, capture.request.steps) == ("torch", 5)
    assert (capture.request.anomaly_kind, capture.request.reason) == (
        "straggler",
        "rank 1 is slow",
    )
    found = node.decision()
    assert (found.outcome, found.capture_id) == ("captured", capture.id)


def test_a_peer_is_well_itself_and_so_is_its_device(tmp_path: Path, stack: ExitStack) -> None:
    node = four(tmp_path, stack)
    local = {rank.rank: rank for rank in node.source.live()}
    slow = replace(STRAGGLER, rank=2, device="GPU-2")
    stall = replace(STRAGGLER, id="a2", kind="data_stall", rank=1, device=None)
    hot = Anomaly(
        id="a3", kind="overheating", time=0.0, severity="warning", summary="92 °C", device="GPU-3"
    )
    assert healthy_peer(slow, local, [slow]) == 1
    assert healthy_peer(slow, local, [slow, stall]) == 3
    assert healthy_peer(slow, local, [slow, stall, hot]) == 0
    local[0].status = "stopped"
    assert healthy_peer(slow, local, [slow, stall, hot]) is None


def test_without_a_healthy_peer_the_slow_rank_is_captured_alone(node: Node) -> None:
    node.see(STRAGGLER, replace(STRAGGLER, id="a2", kind="crash", rank=0, device="GPU-0"))
    assert [[rank.rank for rank in capture.ranks] for capture in node.captures] == [[1]]


def test_where_no_rank_is_named_all_are_captured(node: Node) -> None:
    node.see(replace(STRAGGLER, rank=None))
    assert [rank.rank for rank in node.captures[0].ranks] == [0, 1]


def test_a_hang_is_answered_with_stacks_of_all_and_a_leak_with_memory_of_one(node: Node) -> None:
    node.see(replace(STRAGGLER, kind="memory_leak"))
    # Stacks do not wait for what runs.
    node.see(replace(STRAGGLER, kind="hang", id="a2"))
    leak, hang = node.captures
    assert (leak.request.kind, leak.request.ranks) == ("memory", (1,))
    assert (hang.request.kind, hang.request.ranks) == ("stacks", None)


def test_python_stacks_are_recorded_when_the_same_comes_back(node: Node) -> None:
    node.see(STRAGGLER)
    assert node.captures[0].request.options == ()
    assert node.complete().outcome == "complete"
    node.at += 601
    node.see(replace(STRAGGLER, id="a2", time=700.0), after_s=700)
    assert node.captures[1].request.options == ("stacks",)
    assert node.command(0)["options"] == ["stacks"]


def test_a_kind_that_was_captured_in_vain_is_not_repeated_at_a_price(node: Node) -> None:
    node.see(STRAGGLER)
    node.poll(after_s=61)
    assert node.finished(node.captures[0]).outcome == "failed"
    node.at += 601
    node.see(replace(STRAGGLER, id="a2", time=700.0), after_s=700)
    assert node.captures[1].request.options == ()


# --- what is not ---


def test_a_kind_without_a_recipe_is_reported_and_not_counted(node: Node) -> None:
    node.see(replace(STRAGGLER, kind="crash"))
    found = node.decision()
    assert (found.outcome, found.detail) == ("no_recipe", "triggers.recipes: none for crash")
    assert node.captures == ()


def test_null_switches_a_kind_off(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, recipes={"straggler": None})
    node.see(STRAGGLER)
    assert node.decision().outcome == "no_recipe"
    node.coordinator.policy.config = TriggersConfig(recipes={"data_stall": RecipeConfig()})
    node.see(STRAGGLER, replace(STRAGGLER, id="a2", kind="data_stall"))
    assert [capture.request.anomaly_id for capture in node.captures] == ["a2"]


def test_a_refusal_is_shown_with_its_reason_and_counted_once(node: Node) -> None:
    node.see(STRAGGLER)
    node.complete()
    node.see(replace(STRAGGLER, id="a2"))
    for _ in range(3):
        node.see(replace(STRAGGLER, id="a2"))
    found = node.decision("a2")
    assert found.outcome == "refused_cooldown"
    assert "triggers.cooldown_s leaves" in found.detail
    assert node.counted("refused_cooldown", "anomaly") == 1
    # It ends and is opened again: counted is counted.
    node.see()
    assert node.decision("a2").outcome == "refused_cooldown"
    node.see(replace(STRAGGLER, id="a2"))
    assert node.counted("refused_cooldown", "anomaly") == 1
    assert node.counted("refused_over", "anomaly") == 0


def test_a_dry_run_shows_what_it_would_have_taken(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, dry_run=True)
    node.see(STRAGGLER)
    assert node.decision().outcome == "refused_dry_run"
    assert node.decision().detail == "it would have been taken; triggers.dry_run is on"
    assert node.captures == ()


def test_a_device_whose_job_no_one_knows_is_not_captured(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, recipes={"overheating": RecipeConfig(ranks="culprit")})
    node.see(
        Anomaly(
            id="a1",
            kind="overheating",
            time=0.0,
            severity="warning",
            summary="92 °C",
            device="GPU-1",
        )
    )
    assert node.decision().outcome == "refused_no_rank"
    assert node.counted("refused_no_rank", "anomaly") == 1


# --- again ---


def test_a_busy_rank_is_waited_for(node: Node) -> None:
    manual = node.coordinator.request(MANUAL)
    node.see(STRAGGLER)
    assert node.decision().outcome == "waiting"
    node.see(STRAGGLER)
    assert len(node.captures) == 1
    node.complete()
    node.see(STRAGGLER)
    assert node.captures[-1].id != manual.id
    assert node.decision().outcome == "captured"
    assert node.counted("refused_busy", "anomaly") == 1


def test_what_lasts_longer_than_quiet_hours_is_captured_after_them(
    tmp_path: Path, stack: ExitStack
) -> None:
    node = Node(tmp_path, stack, quiet_hours=("00:00-24:00",))
    for after_s in range(0, 3600, 30):
        node.see(STRAGGLER, after_s=after_s)
    assert node.decision().outcome == "refused_quiet_hours"
    assert node.counted("refused_quiet_hours", "anomaly") == 1
    node.coordinator.policy.config = TriggersConfig()
    node.see(STRAGGLER, after_s=3600)
    assert node.decision().outcome == "captured"
    node.complete()
    node.see(STRAGGLER, after_s=7200)
    assert len(node.captures) == 1


def test_what_lasts_longer_than_a_cooldown_is_captured_after_it(node: Node) -> None:
    node.see(STRAGGLER)
    node.complete()
    another = replace(STRAGGLER, id="a2")
    node.see(another, after_s=1)
    node.at += 601
    # Not at every look: a refusal is asked again after a minute.
    node.see(another, after_s=59)
    assert node.decision("a2").outcome == "refused_cooldown"
    node.see(another, after_s=61)
    assert node.decision("a2").outcome == "captured"


def test_another_refusal_of_the_same_anomaly_is_counted_too(node: Node) -> None:
    node.coordinator.policy.config = TriggersConfig(quiet_hours=("00:00-24:00",))
    node.see(STRAGGLER)
    node.coordinator.policy.config = TriggersConfig(captures_per_hour=0)
    for after_s in (60, 120, 180):
        node.see(STRAGGLER, after_s=after_s)
    assert node.decision().outcome == "refused_budget"
    assert node.counted("refused_quiet_hours", "anomaly") == 1
    assert node.counted("refused_budget", "anomaly") == 1


def test_what_the_store_had_no_room_for_is_asked_for_again(node: Node) -> None:
    node.store.path.rename(node.store.path.with_name("away"))
    for after_s in (0, 1, 61, 62):
        node.see(STRAGGLER, after_s=after_s)
        node.coordinator.finish()
    assert node.decision().outcome == "refused_disk"
    assert node.counted("refused_disk", "anomaly") == 1
    assert len(node.captures) == 2
    node.store.path.with_name("away").rename(node.store.path)
    node.see(STRAGGLER, after_s=122)
    node.coordinator.finish()
    assert node.decision().outcome == "captured"
    assert node.complete().outcome == "complete"


def test_an_event_is_not_captured_hours_after_it(tmp_path: Path, stack: ExitStack) -> None:
    recipes: dict[AnomalyKind, RecipeConfig | None] = {"xid": RecipeConfig(ranks="culprit")}
    node = Node(tmp_path, stack, quiet_hours=("00:00-24:00",), recipes=recipes)
    event = replace(STRAGGLER, kind="xid")
    node.see(event)
    node.coordinator.policy.config = TriggersConfig(recipes=recipes)
    node.see(event, after_s=3600)
    assert node.decision().outcome == "refused_quiet_hours"
    assert node.captures == ()


def test_a_repeated_capture_waits_for_the_end_of_quiet_hours(node: Node) -> None:
    node.see(STRAGGLER)
    for rank in (0, 1):
        node.answer(rank, "capture_failed", detail="interrupted: an evaluation began")
    node.finished(node.captures[0])
    node.coordinator.policy.config = TriggersConfig(quiet_hours=("00:00-24:00",))
    node.see(STRAGGLER, after_s=1)
    assert node.decision().outcome == "refused_quiet_hours"
    node.coordinator.policy.config = TriggersConfig()
    node.see(STRAGGLER, after_s=61)
    assert len(node.captures) == 2


def test_what_is_over_before_its_ranks_are_free_is_counted_and_not_captured(node: Node) -> None:
    node.coordinator.request(MANUAL)
    node.see(STRAGGLER)
    node.see()
    node.complete()
    node.see()
    assert node.decision().outcome == "refused_over"
    assert node.counted("refused_over", "anomaly") == 1
    assert len(node.captures) == 1


def test_an_interrupted_capture_is_repeated_once_whatever_the_cooldown(node: Node) -> None:
    for expected in (1, 2):
        node.see(STRAGGLER)
        assert len(node.captures) == expected
        for rank in (0, 1):
            node.answer(rank, "capture_failed", detail="interrupted: an evaluation began")
        assert node.finished(node.captures[-1]).outcome == "failed"
    for _ in range(3):
        node.see(STRAGGLER)
    assert len(node.captures) == 2
    assert node.decision().capture_id == node.captures[1].id


def test_a_capture_without_the_culprit_is_repeated_when_it_is_back(node: Node) -> None:
    node.see(STRAGGLER)
    node.holders[1].kill()
    node.holders[1].wait()
    node.deliver(0)
    assert node.finished(node.captures[0]).outcome == "partial"
    node.see(STRAGGLER)
    assert node.decision().outcome == "waiting"
    assert "rank 1: the process died before it answered" in node.decision().detail
    assert len(node.captures) == 1
    node.join(1)
    node.see(STRAGGLER)
    assert len(node.captures) == 2


@pytest.mark.parametrize(
    ("detail", "repeated"),
    [
        ("the process ended before it answered", True),
        ("the process is stopped", False),
        ("the process does not respond", False),
    ],
)
def test_stacks_of_a_process_that_cannot_answer_are_not_asked_for_again(
    detail: str, repeated: bool
) -> None:
    ranks = (RankCapture(0, "written", file="rank0.stacks.json"), RankCapture(1, "missing", detail))
    capture = Capture("c", MANUAL, 0.0, ranks=ranks, outcome="partial")
    assert is_interrupted(capture, culprit=1) is repeated


def test_a_capture_that_failed_otherwise_is_not_repeated(node: Node) -> None:
    node.see(STRAGGLER)
    for rank in (0, 1):
        node.answer(rank, "capture_failed", detail="no_space")
    assert node.finished(node.captures[0]).outcome == "failed"
    node.see(STRAGGLER)
    assert len(node.captures) == 1


def test_a_restart_captures_nothing_twice(node: Node) -> None:
    node.see(STRAGGLER)
    capture = node.complete()
    node.restart()
    node.see(STRAGGLER)
    assert [known.id for known in node.captures] == [capture.id]
    assert (node.decision().outcome, node.decision().capture_id) == ("captured", capture.id)


def test_what_a_restart_has_interrupted_is_captured_again_once(node: Node) -> None:
    node.see(STRAGGLER)
    node.restart()
    assert node.captures[0].detail == "interrupted: the daemon ended meanwhile"
    node.see(STRAGGLER)
    assert len(node.captures) == 2
    node.restart()
    node.see(STRAGGLER)
    assert len(node.captures) == 2


# --- many nodes ---


def test_a_kind_of_the_whole_job_is_acted_on_where_rank_0_is(
    tmp_path: Path, stack: ExitStack
) -> None:
    node = Node(tmp_path, stack, ranks=(2, 3), world_size=4)
    node.see(REGRESSION)
    found = node.decision()
    assert (found.outcome, found.detail) == (
        "refused_other_node",
        "the daemon that has rank 0 acts on it",
    )
    assert node.counted("refused_other_node", "anomaly") == 1
    node.see(replace(STRAGGLER, id="a2", rank=3))
    assert [rank.rank for rank in node.captures[0].ranks] == [2, 3]


def test_a_rank_that_is_not_here_any_more_is_not_captured(node: Node) -> None:
    node.see(replace(STRAGGLER, rank=3))
    found = node.decision()
    assert (found.outcome, found.detail) == (
        "refused_no_rank",
        "train has no running rank 3 here, only 0, 1",
    )


def test_waiting_for_others_must_outlast_a_capture(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, ranks=(0, 1), world_size=4)
    node.see(REGRESSION, after_s=1)
    node.see(REGRESSION, after_s=59)
    found = node.decision()
    assert found.outcome == "waiting"
    assert found.detail == "whether it lasts 60 s: it may be another node's capture"
    assert node.captures == ()
    node.see(REGRESSION, after_s=60)
    assert node.decision().outcome == "captured"


def test_another_nodes_capture_triggers_nothing(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, ranks=(0, 1), world_size=4)
    node.see(REGRESSION, after_s=1)
    node.see(after_s=30)
    node.see(after_s=90)
    assert node.decision().outcome == "refused_over"
    assert node.captures == ()


def test_on_one_node_no_one_waits(node: Node) -> None:
    node.see(REGRESSION)
    assert node.decision().outcome == "captured"
