"""Every kind of capture: its command, its files, and which of them give way to which."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.daemon.captures.capture_node import MANUAL, MORE, TRAIN, CaptureNode
from tests.daemon.ranks.ring_files import RingFile
from tests.waiting import eventually
from warpwatch import protocol
from warpwatch_daemon.agent.app import Daemon
from warpwatch_daemon.captures.shim import ShimSession
from warpwatch_daemon.captures.shim_backend import ShimBackend
from warpwatch_daemon.config.loading import parse
from warpwatch_telemetry.captures import CaptureKind, CaptureRequest, RankCapture
from warpwatch_telemetry.errors import Refused

STACKS = CaptureRequest("train", "stacks", "anomaly", anomaly_id="a1", anomaly_kind="hang")


def deliver_stacks(node: CaptureNode) -> None:
    for rank in (0, 1):
        content = f'{{"rank": {rank}, "job": "train", "threads": []}}'
        node.deliver(rank, content.encode(), ".stacks.json")


def test_a_memory_capture_brings_snapshots_and_what_lies_beside_them(node):
    asked = node.coordinator.request(replace(MANUAL, kind="memory"))
    assert (node.command(0)["kind"], node.command(0)["start_step"]) == ("memory", 3)
    name = f"{node.command(0)['id']}.{node.rings[0].path.stem}.{MORE}.memory.json"
    (node.folder.inbox / name).write_text("{}")
    for rank in (0, 1):
        node.deliver(rank, b"pickle", ".memory.pickle")
    capture = node.finished(asked)
    assert capture.outcome == "complete"
    assert capture.files == ("rank0.memory.pickle", "rank0.memory.json", "rank1.memory.pickle")
    assert [rank.verified for rank in capture.ranks] == [None, None]
    assert capture.diagnosis_outcome is None
    assert node.counted("complete", kind="memory") == 1


def test_an_nsys_capture_is_complete_without_files(node):
    asked = node.coordinator.request(replace(MANUAL, kind="nsys"))
    node.answer(0, "capture_finished", first_step=3, last_step=5)
    node.poll()
    assert node.capture(asked).outcome is None
    node.answer(1, "capture_failed", detail="not under nsys")
    capture = node.finished(asked)
    assert (capture.outcome, capture.files) == ("partial", ())
    assert capture.detail == "rank 1: not under nsys"
    again = node.coordinator.request(replace(MANUAL, kind="nsys"))
    node.answer_all("capture_finished", first_step=3, last_step=5)
    capture = node.finished(again)
    assert capture.outcome == "complete"
    assert [(rank.state, rank.file) for rank in capture.ranks] == [("written", None)] * 2


@pytest.mark.parametrize("kind", ["torch", "memory", "nsys"])
def test_stacks_of_a_hang_end_what_waits_for_steps(node, kind):
    waiting = node.coordinator.request(replace(MANUAL, kind=kind))
    node.answer(0, "capture_armed", step=3)
    node.poll()
    stacks = node.coordinator.request(STACKS)
    assert node.command(0)["kind"] == node.command(1)["kind"] == "stacks"
    node.coordinator.finish()
    ended = node.capture(waiting)
    assert ended.outcome == "failed"
    assert ended.ranks[0].detail == "superseded by stacks of a hang"
    assert node.counted("failed", kind=kind) == 1
    # The first one's late answers are no one's, and nothing is sent over the second one's command.
    for ring in node.rings:
        ring.event("capture_disarmed", id=f"{waiting.id}-1", detail="another")
    node.poll()
    assert node.command(0)["kind"] == "stacks"
    deliver_stacks(node)
    assert [rank.state for rank in node.finished(stacks).ranks] == ["written", "written"]


@pytest.mark.parametrize("urgent_first", [True, False])
def test_stacks_are_finished_before_what_they_supersede_which_keeps_what_it_has(node, urgent_first):
    waiting = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.poll()
    stacks = node.coordinator.request(STACKS)
    deliver_stacks(node)
    node.poll()
    if urgent_first:
        node.coordinator.finish_urgent()
        assert node.capture(waiting).outcome is None
    ended, stacks = node.finished(waiting), node.finished(stacks)
    assert [rank.state for rank in stacks.ranks] == ["written", "written"]
    assert stacks.end_time < ended.end_time
    assert (ended.outcome, ended.files[0]) == ("partial", "rank0.pt.trace.json.gz")
    assert ended.detail == "rank 1: superseded by stacks of a hang"


def test_stacks_leave_other_ranks_and_other_stacks_alone(node):
    waiting = node.coordinator.request(replace(MANUAL, ranks=(0,)))
    node.coordinator.request(replace(STACKS, ranks=(1,)))
    assert node.capture(waiting).ranks[0].state == "asked"
    assert node.command(0)["kind"] == "torch"
    with pytest.raises(Refused, match="rank 1 of train is being captured"):
        node.coordinator.request(replace(STACKS, anomaly_kind=None, trigger="manual", ranks=(1,)))


def test_a_rank_without_a_heartbeat_is_looked_at_from_outside(node):
    asked = node.coordinator.request(STACKS)
    for silent, waited in ((False, False), (True, False), (True, True)):
        states = ["missing" if over else "asked" for over in (waited, silent)]
        assert [rank.state for rank in node.capture(asked).ranks] == states
        node.rings[0].heartbeat()
        node.poll(after_s=5)
    node.coordinator.finish()
    assert [rank.detail for rank in node.capture(asked).ranks] == [
        "no answer within 10 s",
        "the process does not respond: no stacks (its process is not visible here)",
    ]


def test_stacks_of_ranks_are_taken_at_once_and_a_fault_costs_one_of_them(node, monkeypatch):
    both = threading.Barrier(2, timeout=300)

    def taken(session: object, rank: RankCapture, folder: Path) -> tuple[RankCapture, tuple[()]]:
        both.wait()
        if rank.rank == 1:
            raise ValueError("a fault")
        return replace(rank, state="written"), ()

    monkeypatch.setattr(ShimSession, "_taken", taken)
    asked = node.coordinator.request(STACKS)
    deliver_stacks(node)
    capture = node.finished(asked)
    assert [rank.state for rank in capture.ranks] == ["written", "failed"]
    assert capture.detail == "rank 1: ValueError: a fault"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Refused("refused_disk", "no space in the inbox"), "refused_disk"), (KeyError(0), "failed")],
)
def test_a_capture_that_cannot_be_begun_leaves_nothing(node, monkeypatch, error, reason):
    def begin(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(ShimBackend, "begin", begin)
    with pytest.raises(Refused) as raised:
        node.coordinator.request(MANUAL)
    assert raised.value.reason == reason
    assert node.counted(reason) == 1
    assert list(node.store.path.glob("*/*/*/*")) == []


def test_a_back_end_with_a_fault_ends_its_captures(node, monkeypatch):
    monkeypatch.setattr(ShimSession, "advance", lambda session, at: 1 / 0)
    capture = node.finished(node.coordinator.request(MANUAL))
    assert (capture.outcome, capture.detail) == ("failed", "rank 0: asked; rank 1: asked")
    assert not node.coordinator.is_busy(TRAIN)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    tree: dict[str, Any] = {
        "http": {"listen": "127.0.0.1:0"},
        "rendezvous": {"dir": str(tmp_path / "run"), "inbox": str(tmp_path / "inbox")},
        "sources": {"nvml": {"enabled": False}, "kernel_log": {"enabled": False}},
        "store": {"url": (tmp_path / "store").as_uri()},
    }
    daemon = Daemon(parse(tree, "test"), None, {})
    yield daemon
    daemon._close()
    listener = daemon.server._socket
    assert listener is not None
    listener.close()


def test_the_daemon_measures_the_disk_of_its_store_in_a_loop(daemon):
    before = daemon.captures.disk._measured
    daemon._start()
    eventually(lambda: daemon.captures.disk._measured is not before)


def test_a_daemon_wants_the_counters_while_nsys_captures_and_ends_captures_with_itself(daemon):
    ring = RingFile(daemon.folder.ranks, world_size=1)
    with ring.held():
        ring.step()
        daemon.pipeline.step()
        assert [rank.job for rank in daemon.state().ranks] == ["train"]
        kinds: tuple[tuple[CaptureKind, bool], ...] = (("stacks", False), ("nsys", True))
        for kind, wanted in kinds:
            asked = daemon.request_capture(CaptureRequest("train", kind, "manual"))
            assert daemon.captures.counters_wanted() is wanted
            ring.event("capture_failed", id=f"{asked.id}-1", detail="no")
            daemon.pipeline.step()
            daemon.captures.coordinator.finish()
            assert daemon.captures.counters_wanted() is False
        # No one is to record for a daemon that is gone.
        daemon.request_capture(CaptureRequest("train", "torch", "manual"))
        daemon._close()
        command = (daemon.folder.commands / f"{ring.path.stem}.cmd").read_bytes()
        assert protocol.decode_command(command)[1]["op"] == "cancel"
