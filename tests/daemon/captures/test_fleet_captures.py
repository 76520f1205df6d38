"""What a fleet asks of one node: what it would capture, a start step of the fleet's, and an end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.daemon.captures.capture_node import ANOTHER, AUTOMATIC, MANUAL, CaptureNode
from warpwatch import protocol
from warpwatch_telemetry.captures import Prepared
from warpwatch_telemetry.errors import Refused

NAME = "20261122T201500-0a1b2c"
CANCELLED = "cancelled by the fleet"


def commands(node: CaptureNode) -> list[bytes]:
    return [path.read_bytes() for path in sorted(node.folder.commands.glob("*.cmd"))]


def test_what_would_be_captured_is_told_and_nothing_is_begun(node):
    before = commands(node)
    node.rings[1].word(protocol.WORD_STEP_BEGUN, 8)
    assert node.coordinator.prepare(MANUAL) == Prepared((0, 1), 3, 7, 0.1)
    assert node.coordinator.prepare(replace(MANUAL, kind="stacks")) == Prepared((0, 1))
    assert commands(node) == before
    assert node.hub.state().captures == ()


def test_the_start_step_of_all_nodes_is_kept_and_who_is_late_stays_late(node):
    asked = node.coordinator.request(MANUAL, NAME, 20)
    assert (asked.id, asked.start_step) == (NAME, 20)
    assert [node.command(rank)["start_step"] for rank in (0, 1)] == [20, 20]
    node.answer(0, "capture_armed", step=20)
    node.answer(1, "capture_late", step=20)
    before = node.command(0)
    node.poll()
    assert node.command(0) == before
    node.deliver(0)
    capture = node.finished(asked)
    found = [(rank.state, rank.first_step) for rank in capture.ranks]
    assert (capture.outcome, found) == ("partial", [("written", 20), ("late", None)])


def test_what_one_node_cannot_do_is_refused_before_it_is_asked_for(node):
    node.rings[1].word(protocol.WORD_STEP_BEGUN, 20)
    with pytest.raises(Refused, match="step 20 is too early: step 19 has begun") as refused:
        node.coordinator.request(MANUAL, NAME, 20)
    assert refused.value.reason == "refused_over"
    node.coordinator.request(replace(AUTOMATIC, ranks=(0,)), NAME, 30)
    with pytest.raises(Refused, match=f"there is a capture {NAME} already"):
        node.coordinator.request(replace(MANUAL, ranks=(1,)), NAME, 30)
    with pytest.raises(Refused, match="is being captured"):
        node.coordinator.prepare(MANUAL)
    with pytest.raises(Refused, match="cooldown_s leaves"):
        node.coordinator.prepare(ANOTHER)
    assert node.counted("refused_cooldown", "anomaly") == 1


def test_what_has_recorded_nothing_is_ended_and_costs_no_budget(tmp_path, stack):
    node = CaptureNode(tmp_path, stack, captures_per_hour=1)
    asked = node.coordinator.request(AUTOMATIC, NAME, 20)
    node.answer(0, "capture_armed", step=20)
    node.poll()
    cancelled = node.coordinator.cancel(NAME, CANCELLED)
    assert cancelled is not None
    assert [(rank.state, rank.detail) for rank in cancelled.ranks] == 2 * [("missing", CANCELLED)]
    assert [node.command(rank)["op"] for rank in (0, 1)] == ["cancel", "cancel"]
    capture = node.finished(asked)
    assert (capture.outcome, CANCELLED in capture.detail) == ("failed", True)
    assert node.coordinator.cancel(NAME, CANCELLED) == capture
    assert node.coordinator.cancel("none", CANCELLED) is None
    assert node.coordinator.request(ANOTHER, f"{NAME}-2", 40).start_step == 40


def test_what_was_recorded_counts_though_it_is_ended(node):
    node.coordinator.request(AUTOMATIC, NAME, 20)
    node.answer(0, "capture_started", step=20)
    node.poll()
    node.coordinator.cancel(NAME, CANCELLED)
    with pytest.raises(Refused, match="cooldown_s leaves"):
        node.coordinator.prepare(ANOTHER)
