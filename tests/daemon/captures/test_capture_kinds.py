"""Every kind of capture: its command, its files, what gives way to what, and what it costs."""

import json
import threading
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import AUTOMATIC, MANUAL, MORE, CaptureNode
from warpwatch_capturing.participant import Collected
from warpwatch_daemon.participants.local_ranks import LocalRanks
from warpwatch_telemetry.captures import CaptureRequest, RankCapture
from warpwatch_telemetry.errors import Refused

STACKS = CaptureRequest("train", "stacks", "anomaly", anomaly_id="a1", anomaly_kind="hang")


def deliver_stacks(node: CaptureNode) -> None:
    for rank in (0, 1):
        content = f'{{"rank": {rank}, "job": "train", "threads": []}}'
        node.deliver(rank, content.encode(), ".stacks.json")


def test_a_memory_capture_says_what_grows_and_brings_snapshots_where_there_are_some(node):
    asked = node.service.request(replace(MANUAL, kind="memory"))
    assert (node.command(0)["kind"], node.command(0)["start_step"]) == ("memory", 3)
    grown = {"type": "torch.Tensor", "bytes_per_step": 6e6, "count_per_step": 1, "line": "a.py:4"}
    for rank in (0, 1):
        host = {"steps": 4, "types": [grown] * rank}
        name = f"{node.command(rank)['id']}.{node.rings[rank].path.stem}.{MORE}.memory.json"
        (node.folder.inbox / name).write_text(json.dumps({"rank": rank, "host": host}))
    # Rank 0 uses a GPU; in the other process there is no allocator to look at.
    node.deliver(0, b"pickle", ".memory.pickle")
    node.answer(1, "capture_finished", more=MORE, first_step=3, last_step=5)
    capture = node.finished(asked)
    made = ("rank0.memory.json", "rank0.memory.pickle", "rank1.memory.json", "diagnosis.json")
    assert (capture.outcome, capture.files) == ("complete", made)
    assert (capture.diagnosis["verdict"], capture.diagnosis_outcome) == ("memory_growth", "ok")
    assert capture.diagnosis["summary"] == (
        "rank 1 keeps 6 MB more each step: 1 torch.Tensor, allocated in a.py:4"
    )
    assert node.counted("complete", kind="memory") == 1


@pytest.fixture
def server(tmp_path: Path, stack: ExitStack) -> CaptureNode:
    """An engine of two workers, with its scheduler."""
    said = {rank: {"kind": "serve", "role": "rank"} for rank in (0, 1)}
    said[2] = {"kind": "serve", "role": "scheduler"}
    return CaptureNode(tmp_path, stack, ranks=(0, 1, 2), said=said)


def test_iterations_are_captured_on_workers_and_stacks_of_all_processes(server):
    asked = server.service.request(MANUAL)
    assert [rank.rank for rank in asked.ranks] == [0, 1]
    assert server.complete(asked).outcome == "complete"
    with pytest.raises(Refused, match="rank 2, the scheduler, has only stacks"):
        server.service.request(replace(MANUAL, ranks=(2,)))
    stacks = server.service.request(replace(STACKS, trigger="manual", anomaly_kind=None))
    assert [rank.rank for rank in stacks.ranks] == [0, 1, 2]


@pytest.mark.parametrize(("idle", "outcome"), [((0, 1), "refused_idle"), ((0,), "failed")])
def test_a_capture_of_an_idle_server_is_refused_after_its_time_to_arm(server, idle, outcome):
    asked = server.service.request(AUTOMATIC)
    server.service.finish_urgent()
    for rank in (0, 1):
        server.rings[rank].second(10**9, 10**9 if rank in idle else 0)
    server.poll()
    server.poll(after_s=61)
    capture = server.finished(asked)
    assert capture.outcome == outcome
    assert server.counted(outcome, "anomaly") == 1
    # Work that comes later starts nothing.
    assert server.command(0) == {"op": "cancel", "id": f"{asked.id}-1"}
    is_refused = outcome == "refused_idle"
    assert server.service.is_settled(asked.id) == is_refused
    for _ in range(2):
        assert server.capture(asked).outcome == outcome
        with nullcontext() if is_refused else pytest.raises(Refused, match="cooldown_s leaves"):
            server.service.prepare(replace(AUTOMATIC, anomaly_id="a2"))
        server.restart()


def test_an_nsys_capture_is_complete_without_files(node):
    asked = node.service.request(replace(MANUAL, kind="nsys"))
    node.answer(0, "capture_finished", first_step=3, last_step=5)
    node.poll()
    assert node.capture(asked).outcome is None
    node.answer(1, "capture_failed", detail="not under nsys")
    capture = node.finished(asked)
    assert (capture.outcome, capture.files) == ("partial", ())
    assert capture.detail == "rank 1: not under nsys"
    again = node.service.request(replace(MANUAL, kind="nsys"))
    node.answer_all("capture_finished", first_step=3, last_step=5)
    capture = node.finished(again)
    assert capture.outcome == "complete"
    assert [(rank.state, rank.file) for rank in capture.ranks] == [("written", None)] * 2


@pytest.mark.parametrize("urgent_first", [True, False])
def test_stacks_are_finished_before_what_they_supersede_which_keeps_what_it_has(node, urgent_first):
    waiting = node.service.request(MANUAL)
    node.deliver(0)
    node.poll(after_s=6)
    stacks = node.service.request(STACKS)
    # They are silent, but their answers come in time.
    node.poll(after_s=1)
    deliver_stacks(node)
    node.poll()
    if urgent_first:
        node.service.finish_urgent()
        assert node.capture(waiting).outcome is None
    ended, stacks = node.finished(waiting), node.finished(stacks)
    assert [rank.state for rank in stacks.ranks] == ["written", "written"]
    assert stacks.end_time < ended.end_time
    assert (ended.outcome, ended.files[0]) == ("partial", "rank0.pt.trace.json.gz")
    assert ended.detail == "rank 1: superseded by stacks of a hang"


def test_a_rank_without_a_heartbeat_is_looked_at_from_outside(node):
    asked = node.service.request(STACKS)
    for silent, waited in ((False, False), (True, False), (True, True)):
        states = ["missing" if over else "asked" for over in (waited, silent)]
        assert [rank.state for rank in node.capture(asked).ranks] == states
        node.rings[0].heartbeat()
        node.poll(after_s=5)
    node.service.finish()
    assert [rank.detail for rank in node.capture(asked).ranks] == [
        "no answer within 10 s",
        "the process does not respond: no stacks (its process is not visible here)",
    ]


def test_stacks_of_ranks_are_taken_at_once_and_a_fault_costs_one_of_them(node, monkeypatch):
    both = threading.Barrier(2, timeout=300)

    def taken(ranks: LocalRanks, rank: RankCapture, folder: Path) -> Collected:
        both.wait()
        if rank.rank == 1:
            raise ValueError("a fault")
        return Collected(replace(rank, state="written"))

    monkeypatch.setattr(LocalRanks, "_fetched", taken)
    asked = node.service.request(STACKS)
    deliver_stacks(node)
    capture = node.finished(asked)
    assert [rank.state for rank in capture.ranks] == ["written", "failed"]
    assert capture.detail == "rank 1: ValueError: a fault"
