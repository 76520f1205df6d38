"""A capture from request to outcome, with ring files that answer as training processes do."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import ANOTHER, AUTOMATIC, MANUAL, TOKEN, CaptureNode
from warpwatch import protocol
from warpwatch_capturing.participant import fastest
from warpwatch_capturing.store import Store
from warpwatch_telemetry.captures import Capture, Prepared
from warpwatch_telemetry.errors import Refused


def states(capture: Capture) -> list[str]:
    return [rank.state for rank in capture.ranks]


def test_a_rank_in_which_no_step_is_seen_is_not_asked_for_steps(node):
    node.kill(1)
    stepless = node.rings[1] = node._ring(1)
    with stepless.held():
        stepless.word(protocol.WORD_CALLS, 96)
        node.poll()
        with pytest.raises(Refused, match=r"rank 1: no end of a step .* in 96 .*step\(\):") as no:
            node.service.request(MANUAL)
        assert no.value.reason == "refused_no_step"
        # Stacks need none.
        node.service.request(replace(MANUAL, kind="stacks"))
        assert node.command(1)["kind"] == "stacks"


def test_a_step_far_from_its_peers_does_not_choose_the_start(tmp_path, stack):
    node = CaptureNode(tmp_path, stack, ranks=(0, 1, 2))
    node.rings[2].word(protocol.WORD_STEP_BEGUN, 1 << 63)
    assert [fastest((1, other)) for other in (1001, 1002)] == [1001, 1]
    asked = node.service.request(MANUAL)
    assert [node.command(rank)["start_step"] for rank in range(3)] == [3, 3, 3]
    for _ in range(4):
        # The rank has passed every start: all are asked three times, with a wider margin each time.
        node.poll()
    assert [node.command(rank)["start_step"] for rank in range(3)] == [1 + 6] * 3
    for rank in (0, 1):
        node.deliver(rank)
    node.poll()
    node.poll(after_s=60)
    capture = node.finished(asked)
    assert states(capture) == ["written", "written", "missing"]
    assert [rank.verified for rank in capture.ranks[:2]] == [True, True]
    assert capture.outcome == "partial"


def test_a_rank_that_is_behind_is_waited_for_until_it_has_passed_the_start_step(node):
    node.service.request(MANUAL)
    before = node.command(0)
    node.answer(0, "capture_armed", step=3)
    # The first has begun the start step; the second the one before it, where it reads its command.
    node.rings[0].word(protocol.WORD_STEP_BEGUN, before["start_step"] + 1)
    node.rings[1].word(protocol.WORD_STEP_BEGUN, before["start_step"])
    node.poll()
    assert node.command(0) == before
    node.rings[1].word(protocol.WORD_STEP_BEGUN, before["start_step"] + 1)
    node.poll()
    # A later attempt has 0.3 s.
    assert node.command(0)["start_step"] == before["start_step"] + 3


@pytest.mark.parametrize(("step_s", "timeout_s"), [(0.1, 60), (70, 280), (1e6, 3600)])
def test_the_start_step_is_waited_for_as_long_as_steps_take(node, step_s, timeout_s):
    node.rings[1].steps_of(3, step_s)
    node.poll()
    asked = node.service.request(MANUAL)
    assert node.command(0)["arm_timeout_s"] == pytest.approx(timeout_s)
    node.poll(after_s=timeout_s - 1)
    node.answer(1, "capture_late", step=9)
    node.poll()
    # The next attempt has all of it again.
    assert node.command(0)["arm_timeout_s"] == pytest.approx(timeout_s)
    node.poll(after_s=timeout_s - 1)
    assert states(node.capture(asked)) == ["asked", "asked"]
    node.poll(after_s=1.5)
    capture = node.finished(asked)
    assert (capture.outcome, states(capture)) == ("failed", ["missing", "missing"])
    assert node.command(0)["op"] == "cancel"


def test_recorded_steps_may_take_twice_their_time(node):
    node.rings[1].steps_of(3, 100.0)
    node.poll()
    asked = node.service.request(MANUAL)
    # The time of an attempt for which one was late does not count.
    node.answer(0, "capture_started", step=4)
    node.answer(1, "capture_late", step=9)
    node.poll()
    node.poll(after_s=50)
    node.answer_all("capture_started", step=9)
    node.poll()
    # Three steps, and one beside them.
    node.poll(after_s=799)
    assert states(node.capture(asked)) == ["recording", "recording"]
    node.poll(after_s=2)
    assert states(node.capture(asked)) == ["missing", "missing"]


def test_no_capture_lasts_for_ever_whatever_a_ring_says(node):
    node.rings[1].steps_of(3, 1e6)
    node.poll()
    asked = node.service.request(MANUAL)
    node.answer(0, "capture_failed", detail="no")
    node.answer(1, "capture_started", step=4)
    node.poll()
    node.poll(after_s=3599)
    assert node.capture(asked).ranks[1].state == "recording"
    node.poll(after_s=2)
    assert node.finished(asked).detail.endswith("rank 1: no file within 3601 s of recording")
    asked = node.service.request(MANUAL)
    for _ in range(2):
        node.poll(after_s=3590)
        node.answer(1, "capture_late", step=9)
        node.poll()
    node.poll(after_s=30)
    assert node.finished(asked).detail.endswith("rank 1: not done within 7200 s")


def test_a_capture_of_all_ranks_is_complete_stored_and_diagnosed(node):
    asked = node.service.request(MANUAL)
    for name, state in (("armed", "armed"), ("of_tomorrow", "armed"), ("started", "recording")):
        node.answer_all(f"capture_{name}", step=3)
        node.poll()
        assert {(one.state, one.detail) for one in node.capture(asked).ranks} == {(state, "")}
    capture = node.complete(asked)
    assert (capture.outcome, capture.detail, capture.diagnosis_outcome) == ("complete", "", "ok")
    found = [(rank.state, rank.first_step, rank.last_step) for rank in capture.ranks]
    assert found == [("written", 3, 5)] * 2
    traces = {"rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"}
    assert {*traces, "diagnosis.json"} <= set(capture.files)
    assert capture.diagnosis is not None
    assert capture.diagnosis["schema"] == 1
    assert list(node.folder.inbox.glob("*.*")) == []
    assert node.counted("complete") == 1
    assert Store(node.store.config).load(10)[0].id == asked.id


def died_after(event: str) -> Callable[[CaptureNode], None]:
    def bring(node: CaptureNode) -> None:
        node.answer(1, event, step=3)
        node.poll()
        node.kill(1)

    return bring


def linked(node: CaptureNode) -> None:
    name = f"{node.command(1)['id']}.{node.rings[1].path.stem}.{TOKEN}.pt.trace.json.gz"
    (node.folder.inbox / name).symlink_to("/etc/passwd")
    node.answer(1, "capture_finished", token=TOKEN)


def delivered(change: Callable[[Path], object]) -> Callable[[CaptureNode], None]:
    def bring(node: CaptureNode) -> None:
        before = set(node.folder.inbox.iterdir())
        node.deliver(1)
        (path,) = set(node.folder.inbox.iterdir()) - before
        change(path)

    return bring


def named(token: str) -> Callable[[CaptureNode], None]:
    return lambda node: node.answer(1, "capture_finished", token=token)


def failed(detail: str) -> Callable[[CaptureNode], None]:
    return lambda node: node.answer(1, "capture_failed", detail=detail)


@pytest.mark.parametrize(
    ("bring", "state", "detail"),
    [
        (lambda node: node.kill(1), "missing", "the process died before it answered"),
        (died_after("capture_armed"), "missing", "the process died while armed"),
        (died_after("capture_started"), "missing", "the process died while recording"),
        (lambda node: node.rings[1].end(), "missing", "the process ended before it answered"),
        (lambda node: node.poll(after_s=60), "missing",
         "step 3 not begun within 60 s: the process is stopped"),
        (failed("no_space"), "failed", "no_space"),
        (failed("no_inbox"), "failed",
         "no_inbox: start the training with WARPWATCH_INBOX=/.*/inbox"),
        (linked, "failed", ".*"),
        (named("../0123456789abc"), "failed", ".*the answer has no token of a file"),
        (delivered(lambda path: os.link(path, f"{path}.other")), "failed", ".* has 2 links.*"),
        pytest.param(
            delivered(lambda path: os.chown(path, 1234, 1234)), "failed",
            ".* belongs to uid 1234.*",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away"),
        ),
    ],
)  # fmt: skip
def test_a_rank_without_a_file_is_named_and_costs_the_other_nothing(node, bring, state, detail):
    asked = node.service.request(MANUAL)
    node.deliver(0)
    node.poll()
    bring(node)
    capture = node.finished(asked)
    assert (capture.outcome, states(capture)) == ("partial", ["written", state])
    assert re.fullmatch(f"rank 1: {detail}", capture.detail)
    assert {path.name[:5] for path in Path(str(capture.folder)).glob("rank*")} == {"rank0"}


def end_during_begin(node: CaptureNode, monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    make = node.store.folder

    def end(capture_id: str, now: float) -> Path:
        node.kill(*ranks)
        list(node.source.poll(node.clock.wall(), node.at))
        return make(capture_id, now)

    monkeypatch.setattr(node.store, "folder", end)


def test_a_rank_that_ends_while_a_capture_begins_is_missing(node, monkeypatch):
    end_during_begin(node, monkeypatch, 1)
    asked = node.service.request(MANUAL)
    node.deliver(0)
    capture = node.finished(asked)
    assert (capture.outcome, capture.detail) == ("partial", "rank 1: the process ended")
    end_during_begin(node, monkeypatch, 0)
    with pytest.raises(Refused, match="every rank of train has just ended"):
        node.service.request(MANUAL)
    assert node.counted("refused_no_rank") == 1
    assert len(list(node.store.path.glob("*/*/*/*"))) == 1


def test_a_capture_that_the_store_has_no_room_for_is_refused_after_all(node):
    shutil.rmtree(node.store.path)
    asked = node.service.request(AUTOMATIC)
    assert node.command(1)["op"] == "capture"
    node.service.finish()
    capture = node.capture(asked)
    detail = f"{node.store.path}: No such file or directory"
    assert (capture.outcome, capture.detail) == ("refused_disk", detail)
    assert states(capture) == ["missing", "missing"]
    assert node.command(1)["op"] == "cancel"
    assert node.counted("refused_disk", "anomaly") == 1
    # Neither the cooldown nor the ranks stand in the way of the next one.
    node.store.path.mkdir()
    again = node.service.request(ANOTHER)
    node.service.finish()
    assert Path(str(again.folder), "capture.json").exists()


NAME = "20261122T201500-0a1b2c"
CANCELLED = "cancelled by the fleet"


def test_what_would_be_captured_is_told_and_nothing_is_begun(node):
    before = [node.command(rank) for rank in (0, 1)]
    node.rings[1].word(protocol.WORD_STEP_BEGUN, 8)
    assert node.service.prepare(MANUAL) == Prepared((0, 1), 3, 7, 0.1)
    assert node.service.prepare(replace(MANUAL, kind="stacks")) == Prepared((0, 1))
    assert (node.captures, [node.command(rank) for rank in (0, 1)]) == ((), before)


def test_the_start_step_of_all_nodes_is_kept_and_who_is_late_stays_late(node):
    asked = node.service.request(MANUAL, NAME, 20)
    node.answer(0, "capture_armed", step=20)
    node.answer(1, "capture_late", step=20)
    node.poll()
    assert [node.command(rank)["start_step"] for rank in (0, 1)] == [20, 20]
    node.deliver(0)
    capture = node.finished(asked)
    assert (capture.id, capture.start_step, capture.outcome) == (NAME, 20, "partial")
    assert states(capture) == ["written", "late"]


def test_what_one_node_cannot_do_is_refused_before_it_is_asked_for(node):
    node.rings[1].word(protocol.WORD_STEP_BEGUN, 20)
    with pytest.raises(Refused, match="step 20 is too early: step 19 has begun") as refused:
        node.service.request(MANUAL, NAME, 20)
    assert refused.value.reason == "refused_over"
    node.service.request(replace(AUTOMATIC, ranks=(0,)), NAME, 30)
    with pytest.raises(Refused, match=f"there is a capture {NAME} already"):
        node.service.request(replace(MANUAL, ranks=(1,)), NAME, 30)
    for request, said in ((MANUAL, "is being captured"), (ANOTHER, "cooldown_s leaves")):
        with pytest.raises(Refused, match=said):
            node.service.prepare(request)
    assert node.counted("refused_cooldown", "anomaly") == 1
