"""Summaries of runs: figures, files, restarts, copies, and comparison."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from tests.daemon.state.counted import counted
from tests.manual_clock import ManualClock
from warpwatch_capturing.remote_store import RemoteStore, RemoteStoreError
from warpwatch_daemon.history.runs import RunFiles, RunTable, RunUploads, key_of
from warpwatch_daemon.state.hub import Hub
from warpwatch_detection.anomalies.register import Change
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import UPLOAD_OUTCOMES, Capture, CaptureRequest
from warpwatch_telemetry.jobs import JobId, RunSummary
from warpwatch_telemetry.records import End, RankEvent, Serve, Step
from warpwatch_telemetry.samples import Device, DeviceSample
from warpwatch_telemetry.state import RankState, ServeState

JOB = JobId("ns/team", "llama 7b", "r1")
BEGAN = 1_700_000_000.0


def step(number: int, duration_s: float = 0.5, rank: int = 0, **changes: object) -> Step:
    phases_s = {"forward": 0.2, "backward": 0.25}
    fields = {"phases_s": phases_s, "tokens": 1000, **JOB.fields(), **changes}
    return msgspec.convert(
        {"time": BEGAN + number, "rank": rank, "step": number, "duration_s": duration_s, **fields},
        Step,
    )


def rank(number: int = 0, status: str = "running", **changes: object) -> RankState:
    about = {"pid": 7, "host": "node1", "world_size": 2, "device": f"GPU-{number}"}
    said = {"framework": "torch 2.13.0", "step_clock": "step()", "first_time": BEGAN}
    fields = {**about, **said, **JOB.fields(), "steps_total": 100, **changes}
    return RankState(rank=number, name=str(number), status=status, **fields)  # type: ignore[arg-type]


def rounded(found: object) -> bytes:
    """As JSON without the last digits, which differ between mathematical libraries."""
    text = msgspec.json.encode(found)
    plain = json.loads(text, parse_float=lambda number: round(float(number), 6))
    return json.dumps(plain, indent=1).encode()


class Node:
    """A table of runs over real files; ``ranks`` are what the rendezvous would show."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock(wall=BEGAN)
        self.hub = Hub(10.0)
        late = rank(1, first_time=BEGAN + 1, world_size=1, steps_total=99)
        self.ranks: tuple[RankState, ...] = (rank(0), late)
        self.hub.watch_ranks(lambda: self.ranks)
        for number in (0, 1):
            device = Device(uuid=f"GPU-{number}", index=number, name="NVIDIA H100")
            self.hub.publish_device(DeviceSample(device=device, time=BEGAN, values={}))
        self.start()

    def start(self) -> None:
        self.runs = RunTable(RunFiles(self.path), self.hub, "node1", self.clock.monotonic)

    def train(self, numbers: range, duration_s: float = 0.5, **changes: object) -> None:
        for number in numbers:
            for one in (0, 1):
                self.runs.observe(step(number, duration_s, one, **changes))
        self.look(10, BEGAN + numbers.stop)

    def look(self, after_s: float, now: float = BEGAN) -> list[str]:
        self.clock.advance(after_s)
        self.runs.advance(now)
        return [run.run for run in self.runs.all()]

    def run(self, job: JobId = JOB) -> RunSummary:
        return next(run for run in self.runs.all() if run.job_id == job)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_run_is_summed_up_while_it_goes_on(node, golden):
    about: dict[str, Any] = {"id": "a1", "time": BEGAN, "severity": "warning", "summary": ""}
    anomaly = Anomaly(kind="straggler", **about, **JOB.fields())
    node.runs.observe(step(0))
    for what in ("opened", "updated", "closed"):
        node.runs.note_change(Change(what, anomaly))
    node.runs.observe(Serve(BEGAN, queue={3: 2}, queue_s=0.1, **JOB.fields()))
    node.train(range(1, 121))
    # 20 steps of each rank are its warm-up.
    golden("history/run.json", rounded(replace(node.run(), version="")))


def test_a_run_that_begins_or_ends_is_shown_within_a_second(node):
    node.train(range(2))
    for number, owner in enumerate(("a", "b")):
        node.runs.observe(step(number, run=owner))
        node.ranks = (*node.ranks, rank(run=owner))
        assert node.look(0.5) == ["r1", "a"][: number + 1]
        assert node.look(0.5) == ["r1", "a", "b"][: number + 2]
    node.runs.observe(step(3))
    before = node.run()
    node.look(9.5)
    assert node.run() == before
    node.look(0.5, BEGAN + 99)
    assert node.run().time == BEGAN + 99


def test_a_run_that_goes_on_is_written_once_a_minute(node):
    node.train(range(2))
    node.runs.write()
    (path,) = node.path.rglob("*.json")
    written, sent = [], [len(node.runs.take_changed())]
    for now in (39, 59, 61, 81):
        node.look(20.0, BEGAN + now)
        node.runs.write()
        written.append(json.loads(path.read_text())["time"] - BEGAN)
        sent.append(len(node.runs.take_changed()))
    assert (written, sent) == ([2, 2, 61, 61], [1, 0, 0, 1, 0])
    # At its end it is written at once, and again as soon as it goes on.
    for status in ("exited", "running"):
        node.ranks = (rank(0, status), rank(1, status))
        node.train(range(100, 110) if status == "exited" else range(110, 120))
        assert [run.end_time is None for run in node.runs.take_changed()] == [status == "running"]
    node.start()
    assert len(node.runs.take_changed()) == 1


def test_a_run_ends_with_its_ranks_and_is_on_disk(node):
    node.train(range(120))
    node.runs.write()
    copied = node.run()
    scheduler = rank(2, "exited", serve=ServeState("scheduler", "", "vllm", ""))
    node.ranks = (rank(0, "exited"), rank(1, "died"), scheduler)
    node.train(range(120, 130))
    assert node.run().tokens_per_s == copied.tokens_per_s
    # A copy of an older summary does not count.
    node.runs.copied(copied, "s3://ours")
    assert node.run().remote is None
    # A failed write is tried again.
    away = (node.path / "runs").rename(node.path / "away")
    (node.path / "runs").touch()
    with pytest.raises(OSError, match="runs"):
        node.runs.write()
    (node.path / "runs").unlink()
    away.rename(node.path / "runs")
    node.runs.write()
    (path,) = node.path.rglob("*.json")
    assert path.relative_to(node.path).as_posix() == "runs/ns%2Fteam/llama%207b/r1.json"
    kept = json.loads(path.read_text())
    assert kept["end_time"] == BEGAN + 130
    assert kept["judged_steps"] == 2 * 110
    # Steps that are read again, from the ring of a process that is gone, begin no other run.
    node.train(range(100, 120))
    assert node.run().time == BEGAN + 130


def test_a_restart_of_the_daemon_counts_no_step_twice(node):
    node.train(range(120))
    node.runs.write()
    node.start()
    # Rings are read again from some steps before.
    node.train(range(90, 200))
    run = node.run()
    node.runs.write()
    assert run.judged_steps == 2 * 180 - 2
    assert run.phases_s == pytest.approx(
        {"forward": 0.2, "backward": 0.25, "other": 0.05}, rel=0.01
    )
    assert run.tokens_per_step == pytest.approx(1000.0)
    # An orderly end writes all, and the next daemon finds that the run has ended meanwhile.
    node.train(range(200, 210))
    node.runs.close(BEGAN + 210)
    node.start()
    assert node.run().judged_steps == 2 * 190 - 2
    node.ranks = (rank(0, "exited", last_step_time=BEGAN + 219), rank(1, "died"))
    for number, record in enumerate((End, RankEvent)):
        detail = {"event": "died"} if record is RankEvent else {}
        node.runs.observe(step(219, rank=number))
        node.runs.observe(record(BEGAN + 225 + number, rank=number, **detail, **JOB.fields()))
    node.runs.observe(RankEvent(BEGAN + 300, rank=0, event="oom", **JOB.fields()))
    node.look(10, BEGAN + 1000)
    assert node.run().end_time == BEGAN + 226
    # Other processes resume it.
    node.ranks = (rank(0, first_time=BEGAN + 2000), rank(1, first_time=BEGAN + 2000))
    node.train(range(2000, 2010))
    assert (node.run().first_time, node.run().steps) == (BEGAN, 200)


def test_energy_goes_on_after_a_restart_and_the_newest_captures_are_named(node, monkeypatch):
    monkeypatch.setattr(node.hub, "job_energy", lambda job: 100.0)
    request = CaptureRequest(kind="torch", trigger="manual", **JOB.fields())
    captures = [Capture(f"c{number}", request, BEGAN) for number in range(21)]
    other = Capture("other", replace(request, run="r0"), BEGAN)
    node.hub.publish(captures=(*captures, other))
    node.train(range(30))
    node.runs.write()
    node.start()
    node.train(range(30, 40))
    for status in ("exited", "running"):
        node.ranks = (rank(0, status), rank(1, status))
        node.train(range(40, 50) if status == "exited" else range(50, 60))
        assert node.run().energy_j == 200.0
    assert node.run().captures == tuple(capture.id for capture in captures[1:])


def test_a_run_that_ended_while_no_daemon_looked_has_ended(node):
    node.train(range(120))
    node.runs.write()
    node.start()
    # An inference server without requests.
    node.look(80.0)
    assert node.run().end_time is None
    node.ranks = ()
    node.start()
    for after_s in (60.0, 9.5):
        node.look(after_s, BEGAN + 1000)
        assert node.run().end_time is None
    node.look(0.5, BEGAN + 1000)
    assert node.run().end_time == BEGAN + 120


def summary(number: int, owner: str = "uid/1", **changes: object) -> RunSummary:
    fields = {"time": BEGAN + number, "first_time": BEGAN + number, "end_time": BEGAN + number}
    return RunSummary(owner, "train", f"r{number:04d}", **{**fields, **changes})  # type: ignore[arg-type]


def test_who_has_the_most_runs_loses_the_oldest(node):
    files = RunFiles(node.path)
    for number in range(1000):
        # The first by name is the newest.
        files.save(summary(number, first_time=BEGAN - number))
    for number in range(5):
        files.save(summary(number, "uid/2", first_time=BEGAN - 5000))
    node.start()
    node.look(10)
    # One file cannot be removed, which is tried again.
    stuck = node.path / "runs/uid%2F1/train/r0997.json"
    stuck.unlink()
    stuck.mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="r0997"):
            node.runs.write()
    runs = RunFiles(node.path).load()
    assert len(runs) == 1000
    assert sum(run.owner == "uid/2" for run in runs) == 5
    assert max(run.run for run in runs if run.owner == "uid/1") == "r0994"


def test_names_are_short_single_segments_of_a_path_and_stay_different():
    assert key_of(JobId("ns/a", "b/c", "../../d")) == "ns%2Fa/b%2Fc/..%2F..%2Fd.json"
    assert key_of(JobId("uid/1", "..", "")) == "uid%2F1/%2E%2E/%00.json"
    first, second = (key_of(JobId("uid/1", "é" * 200 + end, "é" * 99)) for end in "ab")
    assert first != second
    assert [len(part) for part in first.split("/")] == [7, 123, 128]


def test_what_cannot_be_read_costs_nothing_else(node):
    RunFiles(node.path).save(summary(1))
    (node.path / "runs/uid%2F1/train/broken.json").write_text("{")
    (node.path / "runs/uid%2F1/train/newer.json").write_text('{"schema": 2}')
    node.start()
    assert [run.run for run in node.runs.all()] == ["r0001"]


def test_a_summary_is_copied_at_the_end_and_each_ten_minutes(tmp_path):
    pytest.importorskip("obstore")
    (tmp_path / "store").mkdir()
    node = Node(tmp_path / "store")
    remote = RemoteStore((tmp_path / "bucket").as_uri())

    def upload(after_s: float = 0.0) -> float | None:
        node.clock.advance(after_s)
        uploads.advance()
        return counted(node.hub, "uploads_total", "run", "uploaded")

    def uploads_of(runs: RunTable) -> RunUploads:
        clock = node.clock
        return RunUploads(remote, runs, node.hub.metrics, clock.monotonic, clock.wall)

    uploads = uploads_of(node.runs)
    node.train(range(120))
    assert [upload(), upload(589), upload(1), upload(599), upload(1)] == [0, 0, 1, 1, 2]
    copy = tmp_path / "bucket/runs/ns%2Fteam/llama%207b/r1.json"
    assert json.loads(copy.read_text())["end_time"] is None
    assert counted(node.hub, "upload_bytes_total") == 2 * copy.stat().st_size
    node.look(10)
    assert node.run().remote == f"{remote.url}/runs/ns%2Fteam/llama%207b/r1.json"
    node.ranks = (rank(0, "exited"), rank(1, "exited"))
    node.train(range(120, 150))
    assert upload() == 3
    assert json.loads(copy.read_text())["end_time"] == BEGAN + 150
    assert node.run().remote == f"{remote.url}/runs/ns%2Fteam/llama%207b/r1.json"
    assert counted(node.hub, "uploads_pending", "run") == 0
    # Another daemon knows that it is there; the rank 0 of this one is on another node.
    node.runs.write()
    RunFiles(node.path).save(summary(3, ranks=(4, 5)))
    node.start()
    uploads = uploads_of(node.runs)
    assert upload() == 3


def test_a_copy_that_fails_is_counted_and_tried_again_after_pauses(node, caplog, golden_case):
    for number in (1, 2, 3):
        RunFiles(node.path).save(summary(number, ranks=(0,)))
    node.start()
    remote, clock, text = Mock(url="s3://ours"), node.clock, ""
    uploads = RunUploads(remote, node.runs, node.hub.metrics, clock.monotonic, clock.wall)
    # A pause is twice the one before it, and as short as the first after a success.
    for after_s, away, lost in (
        *((0, 1, 0), (4.9, 1, 0), (0.2, 1, 0), (9.9, 1, 0), (0.2, 0, 0), (0, 1, 1)),
        *((0, 1, 0), (4.9, 1, 0), (0.2, 0, 0), (0, 0, 0)),
    ):
        remote.put.side_effect = RemoteStoreError("away") if away else None
        if lost:
            more = (summary(number, ranks=(0,)) for number in (4, 5))
            node.runs._runs |= {one.job_id: one for one in more}
        clock.advance(after_s)
        uploads.advance()
        if lost:
            del node.runs._runs[JobId("uid/1", "train", "r0004")]
        counts = [counted(node.hub, "uploads_total", "run", one) for one in UPLOAD_OUTCOMES]
        pending = counted(node.hub, "uploads_pending", "run")
        text += f"{after_s}: {remote.put.call_count} tried, {counts}, {pending} pending\n"
    golden_case(text + "\n".join(caplog.messages))


def kept(number: int, step_s: float = 0.5, **changes: Any) -> RunSummary:
    """A run of the node's job that ended before, with 200 steps of each rank."""
    first = BEGAN - 1000 + number
    fields = {"first_time": first, "end_time": first + 500, "ranks": (0, 1), "world_size": 2}
    said = {"gpu_model": "NVIDIA H100", "step_clock": "step()", "tokens_per_step": 1000.0}
    figures = {"judged_steps": 400, "step_p50_s": step_s, "phases_s": {"forward": step_s}}
    fields |= {**said, **figures, **changes}
    return RunSummary("ns/team", "llama 7b", f"r-{number}", first, **fields)  # type: ignore[arg-type]


def said(node: Node, *before: RunSummary) -> list[float] | None:
    """Return the step times of earlier runs that detectors get, or None."""
    for run in before:
        RunFiles(node.path).save(run)
    node.start()
    node.train(range(119))
    assert node.runs.take_events() == []
    node.train(range(119, 121))
    events = node.runs.take_events()
    assert node.runs.take_events() == []
    if not events:
        return None
    assert [(event.event, event.rank, event.job_id) for event in events] == [("compared", 0, JOB)]
    detail = events[0].detail
    assert (detail["steps"], detail["step_s"]) == (101, pytest.approx(0.5, rel=0.01))
    found: list[float] = detail["earlier_s"]
    return found


def test_a_run_is_compared_with_the_last_ones_of_its_kind(node):
    runs = [kept(number, 0.4 + number / 100) for number in range(7)]
    assert said(node, *runs) == pytest.approx([0.46, 0.45, 0.44, 0.43, 0.42])
