"""A capture from request to outcome, with ring files that answer as training processes do."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.ring_files import RingFile
from warpwatch.client import protocol
from warpwatch.daemon.captures.coordinator import Coordinator
from warpwatch.daemon.captures.policy import Policy
from warpwatch.daemon.captures.store import Store
from warpwatch.daemon.config import StoreConfig, TriggersConfig
from warpwatch.daemon.errors import Refused
from warpwatch.daemon.hub import Hub
from warpwatch.daemon.rendezvous.folder import RendezvousFolder
from warpwatch.daemon.sources.ranks import RanksSource
from warpwatch.telemetry.captures import Capture, CaptureRequest

MANUAL = CaptureRequest(job="train", kind="torch", trigger="manual", steps=3)
AUTOMATIC = CaptureRequest(
    job="train", kind="torch", trigger="anomaly", anomaly_id="a1", anomaly_kind="straggler"
)
# The least that the diagnosis accepts as a trace: two annotated steps with an operator in each.
TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        event
        for step in (2, 3)
        for event in (
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1,
             "tid": 1, "ts": 1000.0 * step, "dur": 900.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1,
             "ts": 1000.0 * step + 10, "dur": 800.0},
        )
    ],
}  # fmt: skip


class Node:
    """A coordinator over real files, with two ranks played by the test."""

    def __init__(self, path: Path, stack: ExitStack, **triggers: Any) -> None:
        self.folder = RendezvousFolder(path / "run", path / "inbox", "0.0.0")
        stack.callback(self.folder.close)
        self.store = Store(StoreConfig(url=(path / "store").as_uri()))
        self.hub = Hub(10.0)
        self.source = RanksSource(self.folder, 10.0, lambda reason: None, scan_interval_s=0)
        self.at = time.monotonic()
        policy = Policy(TriggersConfig(**triggers), self.store.path)
        self.coordinator = Coordinator(
            policy,
            self.store,
            self.folder,
            self.source,
            self.hub,
            lambda busy: None,
            lambda: None,
            lambda: self.at,
        )
        self.rings = [RingFile(self.folder.ranks, rank=rank) for rank in (0, 1)]
        self.holders = [stack.enter_context(ring.held()) for ring in self.rings]
        for ring in self.rings:
            ring.step()
        self.poll()

    def poll(self, after_s: float = 0.0) -> None:
        self.at += after_s
        for record in self.source.poll(time.time(), self.at):
            self.coordinator.observe(record)
        self.coordinator.advance(self.at)

    def command(self, rank: int) -> dict[str, Any]:
        path = self.folder.commands / (self.rings[rank].path.stem + ".cmd")
        return protocol.decode_command(path.read_bytes())[1]

    def answer(self, rank: int, event: str, **fields: Any) -> None:
        self.rings[rank].event(event, id=self.command(rank)["id"], **fields)

    def deliver(self, rank: int, content: bytes | None = None) -> None:
        """Write the rank's trace into the inbox and say so."""
        name = f"{self.command(rank)['id']}.{self.rings[rank].path.stem}.pt.trace.json.gz"
        data = gzip.compress(json.dumps(TRACE).encode()) if content is None else content
        (self.folder.inbox / name).write_bytes(data)
        self.answer(rank, "capture_finished", first_step=2, last_step=4, file="/etc/passwd")

    def capture(self, capture: Capture) -> Capture:
        return next(c for c in self.hub.state().captures if c.id == capture.id)

    def counted(self, outcome: str, trigger: str = "manual", kind: str = "torch") -> float:
        return self.hub.state().agent.get(("captures_total", (kind, trigger, outcome)), 0.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    return Node(tmp_path, stack)


def test_all_ranks_are_told_the_same_start_step_with_a_margin(node: Node) -> None:
    node.coordinator.request(MANUAL)
    first, second = node.command(0), node.command(1)
    assert first == second
    # Step 1 is begun; 0.15 s are two steps of 0.1 s.
    assert first["start_step"] == 1 + 2
    assert first["steps"] == 3


def test_a_capture_of_all_ranks_is_complete_stored_and_diagnosed(node: Node) -> None:
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
        ("written", 2, 4),
        ("written", 2, 4),
    ]
    assert {"rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz", "diagnosis.json"} <= set(
        capture.files
    )
    assert capture.diagnosis is not None
    assert capture.diagnosis["schema"] == 1
    assert list(node.folder.inbox.iterdir()) == []
    assert node.counted("complete") == 1
    assert Store(node.store.config).load(10)[0].id == asked.id


def test_a_rank_that_is_late_makes_all_ranks_get_a_later_step(node: Node) -> None:
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


def test_answers_to_an_earlier_attempt_do_not_count(node: Node) -> None:
    asked = node.coordinator.request(MANUAL)
    old = node.command(0)["id"]
    node.answer(1, "capture_late", step=9)
    node.poll()
    node.rings[0].event("capture_disarmed", id=old, detail="another command")
    node.poll()
    assert [rank.state for rank in node.capture(asked).ranks] == ["asked", "asked"]


def test_after_three_attempts_it_goes_on_without_the_late_rank(node: Node) -> None:
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


def test_a_rank_that_dies_is_named_and_costs_the_other_nothing(node: Node) -> None:
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
    assert capture.detail == "rank 1: the process died"


def test_ranks_that_never_answer_end_the_capture_after_the_timeout(node: Node) -> None:
    asked = node.coordinator.request(MANUAL)
    node.poll(after_s=61)
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "failed"
    assert {rank.state for rank in capture.ranks} == {"missing"}
    assert node.command(0)["op"] == "cancel"


def test_what_is_no_trace_is_stored_and_said(node: Node) -> None:
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


def test_a_linked_file_in_the_inbox_is_not_followed(node: Node) -> None:
    asked = node.coordinator.request(MANUAL)
    name = f"{node.command(0)['id']}.{node.rings[0].path.stem}.pt.trace.json.gz"
    (node.folder.inbox / name).symlink_to("/etc/passwd")
    node.answer(0, "capture_finished")
    node.answer(1, "capture_failed", detail="no_space")
    node.poll()
    node.coordinator.finish()
    capture = node.capture(asked)
    assert capture.outcome == "failed"
    assert "rank 1: no_space" in capture.detail
    assert not list(Path(str(capture.folder)).glob("rank0*"))


def test_a_file_of_another_user_is_not_taken(node: Node) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    asked = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.deliver(1)
    for path in node.folder.inbox.iterdir():
        os.chown(path, 1234, 1234)
    node.poll()
    node.coordinator.finish()
    assert "belongs to uid 1234" in node.capture(asked).detail


def test_a_rank_that_ends_in_order_while_armed_is_missing(node: Node) -> None:
    asked = node.coordinator.request(MANUAL)
    node.rings[1].word(protocol.WORD_ENDED, 1)
    node.holders[1].kill()
    node.holders[1].wait()
    node.deliver(0)
    node.poll()
    node.coordinator.finish()
    assert node.capture(asked).detail == "rank 1: the process ended"


def test_a_hard_link_in_the_inbox_is_not_taken(node: Node) -> None:
    asked = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.deliver(1)
    for path in list(node.folder.inbox.iterdir()):
        os.link(path, node.folder.inbox / (path.name + ".other"))
    node.poll()
    node.coordinator.finish()
    assert "has 2 links" in node.capture(asked).detail


def test_a_kind_that_is_not_built_is_refused(node: Node) -> None:
    with pytest.raises(Refused, match="not built yet"):
        node.coordinator.request(CaptureRequest("train", "nsys", "manual"))


def test_after_a_restart_a_running_capture_is_failed_and_the_cooldown_goes_on(
    node: Node,
) -> None:
    asked = node.coordinator.request(AUTOMATIC)
    policy = Policy(TriggersConfig(), node.store.path)
    hub = Hub(10.0)
    Coordinator(policy, node.store, node.folder, node.source, hub, lambda busy: None, lambda: None)
    (capture,) = hub.state().captures
    assert (capture.id, capture.outcome) == (asked.id, "failed")
    with pytest.raises(Refused, match="cooldown_s leaves"):
        policy.check(AUTOMATIC, (), time.monotonic())


def test_a_busy_rank_is_refused_and_counted(node: Node) -> None:
    node.coordinator.request(MANUAL)
    with pytest.raises(Refused) as refused:
        node.coordinator.request(MANUAL)
    assert refused.value.reason == "refused_busy"
    assert node.counted("refused_busy") == 1


def test_an_unknown_job_is_refused(node: Node) -> None:
    with pytest.raises(Refused, match="no running rank of job 'other'"):
        node.coordinator.request(CaptureRequest("other", "torch", "manual"))


def test_cooldown_holds_for_automatic_requests_only(node: Node) -> None:
    node.coordinator.request(AUTOMATIC)
    node.poll(after_s=61)
    with pytest.raises(Refused, match="cooldown_s leaves"):
        node.coordinator.request(AUTOMATIC)
    assert node.counted("refused_cooldown", "anomaly") == 1
    assert node.coordinator.request(MANUAL).outcome is None


def test_the_budget_of_an_hour_holds_for_automatic_requests(
    tmp_path: Path, stack: ExitStack
) -> None:
    node = Node(tmp_path, stack, captures_per_hour=1, cooldown_s=0)
    node.coordinator.request(AUTOMATIC)
    node.poll(after_s=61)
    with pytest.raises(Refused, match="captures_per_hour is 1"):
        node.coordinator.request(AUTOMATIC)


def test_dry_run_takes_nothing_and_counts_it(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(tmp_path, stack, dry_run=True)
    with pytest.raises(Refused, match="dry_run"):
        node.coordinator.request(AUTOMATIC)
    assert node.counted("refused_dry_run", "anomaly") == 1


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_captures=2))
    captures = []
    for number in range(4):
        folder = store.folder(f"c{number}", 1000.0 * number)
        capture = Capture(
            f"c{number}", MANUAL, 1000.0 * number, folder=str(folder), outcome="complete"
        )
        store.save(capture)
        captures.append(capture)
    kept, size = store.retain(captures, 5000.0)
    assert [capture.id for capture in kept] == ["c2", "c3"]
    assert size > 0
    assert [capture.id for capture in store.load(10)] == ["c2", "c3"]


def test_retention_by_age_removes_even_the_newest(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_age=3600.0))
    folder = store.folder("old", 0.0)
    capture = Capture("old", MANUAL, 0.0, folder=str(folder), outcome="complete")
    assert store.retain([capture], 3601.0)[0] == []
    assert not folder.exists()


def test_a_second_daemon_on_the_store_is_refused(tmp_path: Path) -> None:
    config = StoreConfig(url=tmp_path.as_uri())
    code = (
        "import sys; from warpwatch.daemon.captures.store import Store\n"
        "from warpwatch.daemon.config import StoreConfig\n"
        "Store(StoreConfig(url=sys.argv[1]))"
    )
    first = Store(config)
    command = [sys.executable, "-c", code, config.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "is another daemon's capture store; set store.url" in done.stderr
    assert first.path == tmp_path


def test_a_rank_without_an_inbox_is_told_how_to_get_one(node: Node) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.answer(rank, "capture_failed", detail="no_inbox")
    node.poll()
    node.coordinator.finish()
    remedy = f"no_inbox: start the training with WARPWATCH_INBOX={node.folder.inbox}"
    assert f"rank 0: {remedy}" in node.capture(asked).detail
