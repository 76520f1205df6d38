"""A capture from request to outcome, with ring files that answer as training processes do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import ANOTHER, AUTOMATIC, MANUAL, TOKEN, CaptureNode
from tests.devices.recording import wait_until
from warpwatch import protocol
from warpwatch_daemon.agent.app import Daemon
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.config.loading import parse
from warpwatch_daemon.config.sections import StoreConfig
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.errors import Refused


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> CaptureNode:
    return CaptureNode(tmp_path, stack)


def test_all_ranks_get_the_same_start_step_with_a_margin(node: CaptureNode) -> None:
    node.coordinator.request(MANUAL)
    first, second = node.command(0), node.command(1)
    assert first == second
    # Step 1 is begun; 0.15 s are two steps of 0.1 s.
    assert first["start_step"] == 1 + 2
    assert first["steps"] == 3


def test_a_rank_in_which_no_step_is_seen_is_not_asked_for_steps(node: CaptureNode) -> None:
    stepless = node.rings[1] = node._ring(1)
    node.holders[1].kill()
    node.holders[1].wait()
    with stepless.held():
        stepless.word(protocol.WORD_CALLS, 96)
        node.poll()
        with pytest.raises(
            Refused, match=r"rank 1: no end of a step .* in 96 .*step\(\):"
        ) as refused:
            node.coordinator.request(MANUAL)
        assert refused.value.reason == "refused_no_step"
        # Stacks need none.
        node.coordinator.request(replace(MANUAL, kind="stacks"))
        assert node.command(1)["kind"] == "stacks"


def test_a_step_far_from_its_peers_does_not_choose_the_start(
    tmp_path: Path, stack: ExitStack
) -> None:
    node = CaptureNode(tmp_path, stack, ranks=(0, 1, 2))
    node.rings[2].word(protocol.WORD_STEP_BEGUN, 1 << 63)
    asked = node.coordinator.request(MANUAL)
    assert [node.command(rank)["start_step"] for rank in range(3)] == [3, 3, 3]
    for _ in range(4):
        # That rank has passed every start: they are asked three times, and wider each time.
        node.poll()
    assert [node.command(rank)["start_step"] for rank in range(3)] == [1 + 6] * 3
    for rank in (0, 1):
        node.deliver(rank)
    node.poll()
    node.poll(after_s=60)
    capture = node.finished(asked)
    assert [rank.state for rank in capture.ranks] == ["written", "written", "missing"]
    assert [rank.verified for rank in capture.ranks[:2]] == [True, True]
    assert capture.outcome == "partial"


def test_a_capture_of_all_ranks_is_complete_stored_and_diagnosed(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.answer(rank, "capture_armed", step=3)
    node.poll()
    for rank in (0, 1):
        node.answer(rank, "capture_started", step=2)
    node.poll()
    assert [rank.state for rank in node.capture(asked).ranks] == ["recording", "recording"]
    for rank in (0, 1):
        node.deliver(rank)
    node.poll()
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "complete"
    assert [(rank.state, rank.first_step, rank.last_step) for rank in capture.ranks] == [
        ("written", 3, 5),
        ("written", 3, 5),
    ]
    assert {"rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz", "diagnosis.json"} <= set(
        capture.files
    )
    assert capture.diagnosis is not None
    assert capture.diagnosis["schema"] == 1
    assert list(node.folder.inbox.glob("*.*")) == []
    assert node.counted("complete") == 1
    assert Store(node.store.config).load(10)[0].id == asked.id


def test_a_rank_that_is_late_makes_all_ranks_get_a_later_step(node: CaptureNode) -> None:
    node.coordinator.request(MANUAL)
    before = node.command(0)
    node.answer(0, "capture_armed", step=3)
    node.answer(1, "capture_late", step=9)
    for ring in node.rings:
        ring.word(protocol.WORD_STEP_BEGUN, 11)
    node.poll()
    after = node.command(0)
    assert after["id"] != before["id"]
    assert after["start_step"] == 10 + 3
    assert node.command(1) == after


def test_a_rank_that_is_behind_is_waited_for_until_it_has_passed_the_start_step(
    node: CaptureNode,
) -> None:
    node.coordinator.request(MANUAL)
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
def test_the_start_step_is_waited_for_as_long_as_steps_take(
    node: CaptureNode, step_s: float, timeout_s: float
) -> None:
    for _ in range(3):
        node.rings[1].step(step_s)
    node.poll()
    asked = node.coordinator.request(MANUAL)
    assert node.command(0)["arm_timeout_s"] == pytest.approx(timeout_s)
    node.poll(after_s=timeout_s - 10)
    node.answer(1, "capture_late", step=9)
    node.poll()
    # The next attempt has all of it again.
    assert node.command(0)["arm_timeout_s"] == pytest.approx(timeout_s)
    node.poll(after_s=timeout_s - 10)
    assert [rank.state for rank in node.capture(asked).ranks] == ["asked", "asked"]
    node.poll(after_s=20)
    assert [rank.state for rank in node.capture(asked).ranks] == ["missing", "missing"]


def test_no_capture_lasts_for_ever_whatever_a_ring_says(node: CaptureNode) -> None:
    for _ in range(3):
        node.rings[1].step(1e6)
    node.poll()
    asked = node.coordinator.request(MANUAL)
    node.answer(0, "capture_failed", detail="no")
    node.answer(1, "capture_started", step=4)
    node.poll()
    node.poll(after_s=3601)
    assert node.finished(asked).detail.endswith("rank 1: no file within 3601 s of recording")
    asked = node.coordinator.request(MANUAL)
    for _ in range(2):
        node.poll(after_s=3590)
        node.answer(1, "capture_late", step=9)
        node.poll()
    node.poll(after_s=30)
    assert node.finished(asked).detail.endswith("rank 1: not done within 7200 s")


def test_answers_to_an_earlier_attempt_do_not_count(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    old = node.command(0)["id"]
    node.answer(1, "capture_late", step=9)
    node.poll()
    node.rings[0].event("capture_disarmed", id=old, detail="another command")
    node.poll()
    assert [rank.state for rank in node.capture(asked).ranks] == ["asked", "asked"]


def test_after_three_attempts_it_goes_on_without_the_late_rank(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    for _ in range(3):
        node.answer(0, "capture_armed", step=3)
        node.answer(1, "capture_late", step=9)
        node.poll()
    node.deliver(0)
    node.poll()
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "partial"
    assert [rank.state for rank in capture.ranks] == ["written", "late"]


def test_a_rank_that_dies_is_named_and_costs_the_other_nothing(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.answer(rank, "capture_armed", step=3)
    node.poll()
    node.holders[1].kill()
    node.holders[1].wait()
    node.deliver(0)
    node.poll()
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "partial"
    assert capture.detail == "rank 1: the process died while armed"


def test_ranks_that_never_answer_end_the_capture_after_the_timeout(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    node.poll(after_s=61)
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "failed"
    assert {rank.state for rank in capture.ranks} == {"missing"}
    assert node.command(0)["op"] == "cancel"


def test_what_is_no_trace_is_stored_and_said(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.deliver(rank, b"garbage")
    node.poll()
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "failed"
    assert capture.diagnosis is None
    assert str(capture.diagnosis_outcome).startswith("unreadable: ")
    assert "rank0.pt.trace.json.gz" in capture.files


def test_a_linked_file_in_the_inbox_is_not_followed(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    name = f"{node.command(0)['id']}.{node.rings[0].path.stem}.{TOKEN}.pt.trace.json.gz"
    (node.folder.inbox / name).symlink_to("/etc/passwd")
    node.answer(0, "capture_finished", token=TOKEN)
    node.answer(1, "capture_failed", detail="no_space")
    node.poll()
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "failed"
    assert "rank 1: no_space" in capture.detail
    assert not list(Path(str(capture.folder)).glob("rank0*"))


def test_a_file_of_another_user_is_not_taken(node: CaptureNode) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    asked = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.deliver(1)
    for path in node.folder.inbox.glob("*.*"):
        os.chown(path, 1234, 1234)
    node.poll()
    node.coordinator.finish()
    assert "belongs to uid 1234" in node.capture(asked).detail


def test_a_rank_that_ends_in_order_while_armed_is_missing(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    node.rings[1].word(protocol.WORD_ENDED, 1)
    node.holders[1].kill()
    node.holders[1].wait()
    node.deliver(0)
    node.poll()
    node.coordinator.finish()
    assert node.capture(asked).detail == "rank 1: the process ended before it answered"


def test_a_rank_that_ends_while_a_capture_begins_is_missing(
    node: CaptureNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_during_begin(node, [1], monkeypatch)
    asked = node.coordinator.request(MANUAL)
    node.deliver(0)
    capture = node.finished(asked)
    assert (capture.outcome, capture.detail) == ("partial", "rank 1: the process ended")


def test_a_capture_whose_ranks_all_end_while_it_begins_is_refused(
    node: CaptureNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_during_begin(node, [0, 1], monkeypatch)
    with pytest.raises(Refused, match="every rank of train has just ended"):
        node.coordinator.request(MANUAL)
    assert node.counted("refused_no_rank") == 1
    assert list(node.store.path.glob("*/*/*/*")) == []


def end_during_begin(node: CaptureNode, ranks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    make = node.store.folder

    def end(capture_id: str, now: float) -> Path:
        for rank in ranks:
            node.holders[rank].kill()
            node.holders[rank].wait()
        list(node.source.poll(time.time(), node.at))
        return make(capture_id, now)

    monkeypatch.setattr(node.store, "folder", end)


def test_a_hard_link_in_the_inbox_is_not_taken(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.deliver(1)
    for path in list(node.folder.inbox.glob("*.*")):
        os.link(path, node.folder.inbox / (path.name + ".other"))
    node.poll()
    node.coordinator.finish()
    assert "has 2 links" in node.capture(asked).detail


def test_after_a_restart_a_running_capture_is_failed_counted_and_the_cooldown_goes_on(
    node: CaptureNode,
) -> None:
    asked = node.coordinator.request(AUTOMATIC)
    node.restart()
    (capture,) = node.hub.state().captures
    assert (capture.id, capture.outcome) == (asked.id, "failed")
    assert node.counted("failed", "anomaly") == 1
    with pytest.raises(Refused, match="cooldown_s leaves"):
        node.coordinator.policy.check(ANOTHER, (), node.at)


def test_a_capture_that_the_store_has_no_room_for_is_refused_after_all(node: CaptureNode) -> None:
    shutil.rmtree(node.store.path)
    asked = node.coordinator.request(AUTOMATIC)
    assert node.command(1)["op"] == "capture"
    node.coordinator.finish()
    capture = node.capture(asked)
    assert (capture.outcome, capture.detail) == (
        "refused_disk",
        f"{node.store.path}: No such file or directory",
    )
    assert [rank.state for rank in capture.ranks] == ["missing", "missing"]
    assert node.command(1)["op"] == "cancel"
    assert node.counted("refused_disk", "anomaly") == 1
    # Neither the cooldown nor the ranks stand in the way of the next one.
    node.store.path.mkdir()
    again = node.coordinator.request(ANOTHER)
    node.coordinator.finish()
    assert Path(str(again.folder), "capture.json").exists()


def test_a_capture_whose_store_goes_before_its_folder_is_made_ends_once(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.deliver(rank)
    node.poll()
    shutil.rmtree(node.store.path)
    node.coordinator.finish()
    assert node.capture(asked).outcome == "refused_disk"
    assert node.counted("refused_disk") == 1
    assert node.counted("failed") == node.counted("complete") == 0


def test_of_captures_without_room_the_newest_ten_are_shown(node: CaptureNode) -> None:
    shutil.rmtree(node.store.path)
    asked = []
    for _ in range(12):
        asked.append(node.coordinator.request(MANUAL).id)
        node.coordinator.finish()
    assert [capture.id for capture in node.hub.state().captures] == asked[2:]
    assert node.counted("refused_disk") == 12


def test_a_busy_rank_is_refused_and_counted(node: CaptureNode) -> None:
    node.coordinator.request(MANUAL)
    with pytest.raises(Refused) as refused:
        node.coordinator.request(MANUAL)
    assert refused.value.reason == "refused_busy"
    assert node.counted("refused_busy") == 1


def test_an_unknown_job_is_refused(node: CaptureNode) -> None:
    with pytest.raises(Refused, match="no running rank of job 'other'"):
        node.coordinator.request(CaptureRequest("other", "torch", "manual"))


def test_cooldown_holds_for_automatic_requests_only(node: CaptureNode) -> None:
    node.coordinator.request(AUTOMATIC)
    node.poll(after_s=61)
    with pytest.raises(Refused, match="cooldown_s leaves"):
        node.coordinator.request(ANOTHER)
    assert node.counted("refused_cooldown", "anomaly") == 1
    assert node.coordinator.request(MANUAL).outcome is None


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_captures=2))
    captures = []
    for number in range(4):
        folder = store.folder(f"c{number}", 1000.0 * number)
        capture = Capture(
            f"c{number}", MANUAL, 1000.0 * number, folder=str(folder), outcome="complete"
        )
        store.create(capture)
        captures.append(capture)
    kept, size = store.retain(captures, 5000.0)
    assert [capture.id for capture in kept] == ["c2", "c3"]
    assert size > 0
    assert [capture.id for capture in store.load(10)] == ["c2", "c3"]


def test_the_baseline_of_a_job_is_not_the_first_to_be_deleted(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_captures=2, max_age=9000.0))
    captures = []
    for number in range(4):
        folder = store.folder(f"c{number}", 1000.0 * number)
        capture = Capture(
            f"c{number}", MANUAL, 1000.0 * number, folder=str(folder), outcome="complete"
        )
        captures.append(capture)
    kept, _ = store.retain(captures, 5000.0, {"c0"})
    assert [capture.id for capture in kept] == ["c0", "c3"]
    # Its age holds for it too.
    assert [capture.id for capture in store.retain(kept, 9001.0, {"c0"})[0]] == ["c3"]


def test_the_captures_of_who_has_the_most_give_way(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_bytes=100 << 10))
    captures = []
    # The newest is too large by itself, and the others' are small and old.
    for number, (owner, kib) in enumerate((("ns/a", 10), ("ns/b", 10), ("ns/c", 95))):
        folder = store.folder(f"c{number}", 1000.0 * number)
        request = replace(MANUAL, owner=owner)
        at = 1000.0 * number
        capture = Capture(f"c{number}", request, at, folder=str(folder), outcome="complete")
        store.create(capture)
        (folder / "rank0.pt.trace.json.gz").write_bytes(bytes(kib << 10))
        captures.append(capture)
    assert [capture.id for capture in store.retain(captures, 5000.0)[0]] == ["c0", "c1"]
    assert [capture.id for capture in store.load(10)] == ["c0", "c1"]


def test_retention_by_age_removes_even_the_newest(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_age=3600.0))
    folder = store.folder("old", 0.0)
    capture = Capture("old", MANUAL, 0.0, folder=str(folder), outcome="complete")
    store.create(capture)
    assert store.retain([capture], 3601.0)[0] == []
    assert not folder.exists()


def test_a_second_daemon_on_the_store_is_refused(tmp_path: Path) -> None:
    config = StoreConfig(url=tmp_path.as_uri())
    code = (
        "import sys; from warpwatch_daemon.captures.store import Store\n"
        "from warpwatch_daemon.config.sections import StoreConfig\n"
        "Store(StoreConfig(url=sys.argv[1]))"
    )
    first = Store(config)
    command = [sys.executable, "-c", code, config.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "is another daemon's capture store; set store.url" in done.stderr
    assert first.path == tmp_path


def test_a_rank_without_an_inbox_hears_how_to_get_one(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.answer(rank, "capture_failed", detail="no_inbox")
    node.poll()
    node.coordinator.finish()
    remedy = f"no_inbox: start the training with WARPWATCH_INBOX={node.folder.inbox}"
    assert f"rank 0: {remedy}" in node.capture(asked).detail


def test_the_daemon_measures_the_disk_of_its_store_in_a_loop(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "http": {"listen": "127.0.0.1:0"},
        "rendezvous": {"dir": str(tmp_path / "run"), "inbox": str(tmp_path / "inbox")},
        "sources": {"nvml": {"enabled": False}, "kernel_log": {"enabled": False}},
        "store": {"url": (tmp_path / "store").as_uri()},
    }
    daemon = Daemon(parse(tree, "test"), None, {})
    before = daemon.captures.disk._measured
    daemon._start()
    try:
        wait_until(lambda: daemon.captures.disk._measured is not before)
    finally:
        daemon._close()
    listener = daemon.server._socket
    assert listener is not None
    listener.close()
