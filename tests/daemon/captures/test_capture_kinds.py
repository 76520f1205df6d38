"""Every kind of capture: its command, its files, and which of them give way to which."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import MANUAL, MORE, CaptureNode
from tests.daemon.ranks.ring_files import RingFile
from warpwatch import protocol
from warpwatch_daemon.agent.app import Daemon
from warpwatch_daemon.captures.session import CaptureSession, Pace
from warpwatch_daemon.captures.verification import Expectation
from warpwatch_daemon.config.loading import parse
from warpwatch_devices.dcgm.pause import ProfilingPause
from warpwatch_telemetry.captures import Capture, CaptureKind, CaptureRequest, RankCapture
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent

STACKS = CaptureRequest("train", "stacks", "anomaly", anomaly_id="a1", anomaly_kind="hang")


@pytest.fixture
def node(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield CaptureNode(tmp_path, stack)


def test_options_reach_the_command(node: CaptureNode) -> None:
    node.coordinator.request(replace(MANUAL, options=("shapes", "stacks")))
    assert node.command(1)["options"] == ["shapes", "stacks"]


def test_a_memory_capture_brings_snapshots_and_what_lies_beside_them(node: CaptureNode) -> None:
    asked = node.coordinator.request(replace(MANUAL, kind="memory"))
    assert (node.command(0)["kind"], node.command(0)["start_step"]) == ("memory", 3)
    name = f"{node.command(0)['id']}.{node.rings[0].path.stem}.{MORE}.memory.json"
    (node.folder.inbox / name).write_text("{}")
    for rank in (0, 1):
        node.deliver(rank, b"pickle", ".memory.pickle")
    capture = node.finished(asked)
    assert capture.outcome == "complete"
    assert capture.files == (
        "rank0.memory.pickle",
        "rank0.memory.json",
        "rank1.memory.pickle",
    )
    assert [rank.verified for rank in capture.ranks] == [None, None]
    assert capture.diagnosis_outcome is None
    assert node.counted("complete", kind="memory") == 1


def test_an_nsys_capture_is_complete_without_files(node: CaptureNode) -> None:
    asked = node.coordinator.request(replace(MANUAL, kind="nsys"))
    node.answer(0, "capture_finished", first_step=3, last_step=5)
    node.poll()
    assert node.capture(asked).outcome is None
    node.answer(1, "capture_failed", detail="not under nsys")
    capture = node.finished(asked)
    assert (capture.outcome, capture.files) == ("partial", ())
    assert capture.detail == "rank 1: not under nsys"
    again = node.coordinator.request(replace(MANUAL, kind="nsys"))
    for rank in (0, 1):
        node.answer(rank, "capture_finished", first_step=3, last_step=5)
    capture = node.finished(again)
    assert capture.outcome == "complete"
    assert [(rank.state, rank.file) for rank in capture.ranks] == [("written", None)] * 2


@pytest.mark.parametrize("kind", ["torch", "memory", "nsys"])
def test_stacks_of_a_hang_end_what_waits_for_steps(node: CaptureNode, kind: Any) -> None:
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
    for rank in (0, 1):
        node.rings[rank].event("capture_disarmed", id=f"{waiting.id}-1", detail="another")
    node.poll()
    assert node.command(0)["kind"] == "stacks"
    for rank in (0, 1):
        content = {"rank": rank, "job": "train", "threads": []}
        node.deliver(rank, json.dumps(content).encode(), ".stacks.json")
    assert [rank.state for rank in node.finished(stacks).ranks] == ["written", "written"]


def test_what_a_superseded_capture_has_brought_already_is_kept(node: CaptureNode) -> None:
    waiting = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.poll()
    node.coordinator.request(STACKS)
    node.coordinator.finish()
    ended = node.capture(waiting)
    assert (ended.outcome, ended.files[0]) == ("partial", "rank0.pt.trace.json.gz")
    assert ended.detail == "rank 1: superseded by stacks of a hang"


def test_stacks_of_other_ranks_leave_a_capture_alone(node: CaptureNode) -> None:
    waiting = node.coordinator.request(replace(MANUAL, ranks=(0,)))
    node.coordinator.request(replace(STACKS, ranks=(1,)))
    assert node.capture(waiting).ranks[0].state == "asked"
    assert node.command(0)["kind"] == "torch"


def test_stacks_are_finished_before_what_they_supersede(node: CaptureNode) -> None:
    waiting = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.poll()
    stacks = node.coordinator.request(STACKS)
    for rank in (0, 1):
        found = f'{{"rank": {rank}, "job": "train", "threads": []}}'
        node.deliver(rank, found.encode(), ".stacks.json")
    node.poll()
    node.coordinator.finish_urgent()
    assert [rank.state for rank in node.capture(stacks).ranks] == ["written", "written"]
    assert node.capture(waiting).outcome is None


def test_a_rank_without_a_heartbeat_is_looked_at_from_outside(node: CaptureNode) -> None:
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


def test_stacks_do_not_supersede_stacks(node: CaptureNode) -> None:
    node.coordinator.request(STACKS)
    with pytest.raises(Refused, match="rank 0, 1 of train is being captured"):
        node.coordinator.request(replace(STACKS, anomaly_kind=None, trigger="manual"))


def test_ranks_that_are_not_there_are_named_with_those_that_are(node: CaptureNode) -> None:
    with pytest.raises(Refused, match="train has no running rank 4, 7 here, only 0, 1"):
        node.coordinator.request(replace(MANUAL, ranks=(1, 4, 7)))


class HostEngine:
    """DCGM's side of a pause."""

    paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


def test_dcgm_gives_the_counters_up_while_nsys_captures_and_for_nothing_else(
    tmp_path: Path,
) -> None:
    tree: dict[str, Any] = {
        "http": {"listen": "127.0.0.1:0"},
        "rendezvous": {"dir": str(tmp_path / "run"), "inbox": str(tmp_path / "inbox")},
        "sources": {"nvml": {"enabled": False}},
        "store": {"url": (tmp_path / "store").as_uri()},
    }
    daemon = Daemon(parse(tree, "test"), None, {})
    engine: Any = HostEngine()
    pause = ProfilingPause()

    def paused() -> bool:
        # As the source of DCGM does it every round.
        pause.follow(engine, daemon.captures.counters_wanted(), 0.0)
        return bool(engine.paused)

    ring = RingFile(daemon.folder.ranks, world_size=1)
    with ring.held():
        ring.step()
        daemon.pipeline.step()
        assert [rank.job for rank in daemon.state().ranks] == ["train"]
        kinds: tuple[tuple[CaptureKind, bool], ...] = (("stacks", False), ("nsys", True))
        for kind, wanted in kinds:
            asked = daemon.request_capture(CaptureRequest("train", kind, "manual"))
            assert paused() is wanted
            ring.event("capture_failed", id=f"{asked.id}-1", detail="no")
            daemon.pipeline.step()
            daemon.captures.coordinator.finish()
            assert paused() is False
        # No one is to record for a daemon that is gone.
        daemon.request_capture(CaptureRequest("train", "torch", "manual"))
        daemon._close()
        command = (daemon.folder.commands / f"{ring.path.stem}.cmd").read_bytes()
        assert protocol.decode_command(command)[1]["op"] == "cancel"
    listener = daemon.server._socket
    assert listener is not None
    listener.close()


class BrokenSession(CaptureSession):
    """A session of another back end, with a fault in it."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture, ())
        self.ranks = {0: RankCapture(0, "armed")}

    def observe(self, event: RankEvent | End, at: float) -> None:
        pass

    def advance(self, at: float) -> bool:
        raise RuntimeError("a fault")

    def _withdraw(self, rank: RankCapture) -> None:
        pass

    def _taken(self, rank: RankCapture, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        return rank, ()

    def expectation(self, number: int) -> Expectation | None:
        return None


class TwoRanks(BrokenSession):
    """Its ranks come to ``collect`` together, or not at all; the second's has a fault."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture)
        self.ranks = {number: RankCapture(number, "exported") for number in (0, 1)}
        self._both = threading.Barrier(2, timeout=30)

    def advance(self, at: float) -> bool:
        return True

    def _taken(self, rank: RankCapture, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        self._both.wait()
        if rank.rank == 1:
            raise ValueError("a fault")
        return replace(rank, state="written"), ()


TRAIN = JobId("uid/0", "train", "")


class BrokenBackend:
    def __init__(self, begin: Callable[[Capture], BrokenSession] = BrokenSession) -> None:
        self._begin = begin

    def jobs(self) -> Collection[JobId]:
        return (TRAIN,)

    def ranks(self, job: JobId) -> Mapping[int, int]:
        return {0: 1}

    def pace(self, job: JobId, numbers: Collection[int]) -> Pace:
        return Pace(0, 0.0)

    def events_per_step(self, job: JobId) -> int | None:
        return None

    def begin(self, capture: Capture, numbers: Sequence[int], at: float) -> BrokenSession:
        return self._begin(capture)


def test_stacks_of_ranks_are_taken_at_once_and_a_fault_costs_one_of_them(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = CaptureNode(tmp_path, stack, backend=BrokenBackend(TwoRanks))
        asked = node.coordinator.request(STACKS)
        capture = node.finished(asked)
        assert [rank.state for rank in capture.ranks] == ["written", "failed"]
        assert capture.detail == "rank 1: ValueError: a fault"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Refused("refused_disk", "no space in the inbox"), "refused_disk"), (KeyError(0), "failed")],
)
def test_a_capture_that_cannot_be_begun_leaves_nothing(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    def begin(capture: Capture) -> BrokenSession:
        raise error

    with ExitStack() as stack:
        node = CaptureNode(tmp_path, stack, backend=BrokenBackend(begin))
        with pytest.raises(Refused) as raised:
            node.coordinator.request(MANUAL)
        assert raised.value.reason == reason
        assert node.counted(reason) == 1
        assert list(node.store.path.glob("*/*/*/*")) == []


def test_a_back_end_with_a_fault_ends_its_captures(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = CaptureNode(tmp_path, stack, backend=BrokenBackend())
        asked = node.coordinator.request(MANUAL)
        capture = node.finished(asked)
        assert (capture.outcome, capture.detail) == ("failed", "rank 0: armed")
        assert not node.coordinator.is_busy(TRAIN)
