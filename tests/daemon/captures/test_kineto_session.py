"""A capture by Kineto: what is ordered, what becomes of it, and whose files are taken."""

from __future__ import annotations

import gzip
import os
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warpwatch_daemon.captures.disk import Disk
from warpwatch_daemon.captures.kineto.backend import KinetoBackend
from warpwatch_daemon.captures.kineto.pollers import Pollers, Sender
from warpwatch_daemon.captures.kineto.process_facts import UNKNOWN, ProcessFacts
from warpwatch_daemon.captures.kineto.protocol import Poll
from warpwatch_daemon.captures.kineto.session import KinetoSession, TraceFile
from warpwatch_daemon.captures.policy import Policy
from warpwatch_daemon.config.triggers import TriggersConfig
from warpwatch_daemon.ranks.inbox import InboxError
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.state import JobState

UID = os.getuid()
TRACE = b'{"traceEvents": [], "traceName": "x" }'


class Bench:
    """A back end with an inbox, and processes that poll by hand. Times begin at 0."""

    def __init__(self, folder: Path) -> None:
        self.inbox = folder / "inbox"
        self.inbox.mkdir()
        self.store = folder / "store"
        self.store.mkdir()
        self.processes = Pollers(
            lambda sender: ProcessFacts("job", int(sender.name), 2, sender.name, known=True)
        )
        self.rings: list[Any] = []
        policy = Policy(TriggersConfig(), Disk(self.store))
        disk = Disk(self.inbox)
        self.backend = KinetoBackend(policy, disk, self.processes, lambda: self.rings)
        # Captures are asked for at 1.
        self.epoch = time.time() - 1.0

    def poll(self, rank: int, at: float, ready: bool = True) -> dict[str, str]:
        """What the rank is asked for, by key."""
        sender = Sender(str(rank), 100 + rank, UID)
        text = self.processes.poll(Poll(ready, 0, (100 + rank, 1)), sender, self.epoch + at, at)
        return dict(line.split("=", 1) for line in text.splitlines())

    def begin(self, *ranks: int, at: float = 1.0, **request: Any) -> KinetoSession:
        asked = CaptureRequest("job", "torch", "manual", owner=f"uid/{UID}", **request)
        return self.backend.begin(Capture("c1", asked, self.epoch), ranks, at)

    def write(self, asked: dict[str, str], rank: int, content: bytes = TRACE) -> Path:
        """As libkineto does."""
        path = Path(asked["ACTIVITIES_LOG_FILE"].replace(".json", f"_{100 + rank}.json"))
        path.write_bytes(content)
        return path


def advance(session: KinetoSession, at: float) -> bool:
    """After a look at the inbox, as the loop for it does it."""
    session.look(at)
    return session.advance(at)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    for rank in (0, 1):
        bench.poll(rank, 0.0)
        bench.poll(rank, 1.0)
    return bench


def test_all_ranks_begin_together_once_each_has_had_the_time_to_ask(bench: Bench) -> None:
    asked = time.time()
    session = bench.begin(0, 1, options=("shapes",))
    zero, one = bench.poll(0, 1.5), bench.poll(1, 2.0)
    starts = {asked["PROFILE_START_TIME"] for asked in (zero, one)}
    # Asked at 1.0, both polls are due at 2.0: 0.2 s for a late one, 1 s until it is looked at.
    (start,) = starts
    assert int(start) / 1000 - asked >= 2.49
    assert zero["ACTIVITIES_DURATION_MSECS"] == "1000"
    assert zero["PROFILE_REPORT_INPUT_SHAPES"] == "true"
    assert zero["ACTIVITIES_LOG_FILE"] != one["ACTIVITIES_LOG_FILE"]
    assert not advance(session, 2.1)
    assert {rank.state for rank in session.ranks.values()} <= {"armed", "recording"}


def test_a_whole_file_is_taken_and_nothing_stays_behind(bench: Bench) -> None:
    session = bench.begin(0)
    path = bench.write(bench.poll(0, 2.0), 0)
    assert not advance(session, 3.0)
    assert advance(session, 4.0)
    rank, files = session.collect(0, bench.store)
    assert (rank.state, rank.file, files) == (
        "written",
        "rank0.pt.trace.json.gz",
        ("rank0.pt.trace.json.gz",),
    )
    assert gzip.decompress((bench.store / files[0]).read_bytes()) == TRACE
    assert not path.exists()
    assert os.listdir(bench.store) == ["rank0.pt.trace.json.gz"]


def test_a_file_that_grows_or_has_no_end_is_waited_for(bench: Bench) -> None:
    session = bench.begin(0)
    path = bench.write(bench.poll(0, 2.0), 0, TRACE[:-1])
    for at in (3.0, 4.0, 5.0):
        assert not advance(session, at)
    path.write_bytes(TRACE)
    # The size has changed just now.
    assert not advance(session, 6.0)
    assert advance(session, 7.0)


def test_what_pytorch_refused_is_asked_for_once_more_with_more_time(bench: Bench) -> None:
    session = bench.begin(0)
    first = bench.poll(0, 2.0)
    # Still waiting for its start, then ready although it should record.
    bench.poll(0, 3.0)
    assert not advance(session, 20.0)
    bench.poll(0, 30.0)
    assert not advance(session, 31.0)
    assert not advance(session, 33.0)
    assert session.ranks[0].state == "asked"
    second = bench.poll(0, 34.0)
    assert second["ACTIVITIES_LOG_FILE"] != first["ACTIVITIES_LOG_FILE"]
    assert int(second["PROFILE_START_TIME"]) == round((bench.epoch + 34.0 + 3.9) * 1000)
    bench.poll(0, 60.0)
    assert not advance(session, 61.0)
    assert advance(session, 63.0)
    assert session.ranks[0].state == "failed"
    assert "wrote nothing" in session.ranks[0].detail


def test_the_second_request_can_bring_the_trace(bench: Bench) -> None:
    session = bench.begin(0)
    bench.poll(0, 2.0)
    bench.poll(0, 30.0)
    advance(session, 33.0)
    bench.write(bench.poll(0, 34.0), 0)
    advance(session, 40.0)
    assert advance(session, 41.0)
    assert session.collect(0, bench.store)[0].state == "written"


def test_a_process_that_never_asks_or_never_writes_is_given_up(bench: Bench) -> None:
    session = bench.begin(0, 1)
    bench.poll(0, 2.0)
    bench.poll(0, 4.0, ready=False)
    assert not advance(session, 60.0)
    assert not advance(session, 61.0)
    assert session.ranks[1].detail == "the process did not ask for anything within 60 s"
    assert advance(session, 123.5)
    assert session.ranks[0].detail == "no trace within 122 s of the request"


def test_a_process_that_ended_is_missing_unless_it_left_its_file(bench: Bench) -> None:
    session = bench.begin(0, 1)
    bench.write(bench.poll(0, 2.0), 0)
    advance(session, 2.5)
    for name in ("0", "1"):
        bench.processes.forget(name)
    assert not advance(session, 3.0)
    assert advance(session, 4.0)
    states = {number: (rank.state, rank.detail) for number, rank in session.ranks.items()}
    assert states == {0: ("exported", ""), 1: ("missing", "the process ended")}


def test_a_process_that_ended_while_it_wrote_is_missing(bench: Bench) -> None:
    session = bench.begin(0)
    bench.write(bench.poll(0, 2.0), 0, TRACE[:-1])
    bench.processes.forget("0")
    assert not advance(session, 3.0)
    assert advance(session, 4.0)
    assert session.ranks[0].detail == "the process ended"


def test_what_is_cancelled_is_never_ordered(bench: Bench) -> None:
    session = bench.begin(0)
    session.cancel("the daemon stops")
    assert bench.poll(0, 2.0) == {}
    assert (session.ranks[0].state, session.ranks[0].detail) == ("missing", "the daemon stops")


def test_steps_are_a_window_where_the_same_process_reports_their_time(bench: Bench) -> None:
    recent = deque([0.05, 0.06, 0.07])
    bench.rings = [SimpleNamespace(owner_uid=UID, pid=100, recent=recent)]
    bench.begin(0, steps=10)
    assert bench.poll(0, 2.0)["ACTIVITIES_DURATION_MSECS"] == "600"
    bench.rings = [SimpleNamespace(owner_uid=UID + 1, pid=100, recent=recent)]
    bench.begin(0, steps=10)
    assert bench.poll(0, 3.0)["ACTIVITIES_DURATION_MSECS"] == "1000"


def test_a_gpu_gets_its_second_to_attach(bench: Bench) -> None:
    bench.processes.register(Sender("0", 100, UID))
    bench.poll(0, 1.5)
    session = bench.begin(0, at=1.5)
    assert bench.poll(0, 2.5)["ACTIVITIES_WARMUP_PERIOD_SECS"] == "1"
    expected = session.expectation(0)
    assert expected is not None
    assert (expected.on_gpu, expected.rank, expected.first_step) == (True, 0, None)


def test_of_a_process_of_unknown_origin_no_rank_is_expected(bench: Bench) -> None:
    bench.processes = Pollers(lambda sender: UNKNOWN)
    policy = Policy(TriggersConfig(), Disk(bench.store))
    backend = KinetoBackend(policy, Disk(bench.inbox), bench.processes, list)
    bench.poll(5, 0.0)
    capture = Capture(
        "c1", CaptureRequest("kineto", "torch", "manual", owner=f"uid/{UID}"), bench.epoch
    )
    expected = backend.begin(capture, [0], 1.0).expectation(0)
    assert expected is not None
    assert expected.rank is None


def test_jobs_are_reported_with_their_ranks(bench: Bench) -> None:
    job = JobState("job", 2, ("0", "1"), backend="kineto", owner=f"uid/{UID}")
    assert bench.backend.states() == (job,)


def test_a_rank_that_has_just_ended_refuses_the_capture(bench: Bench) -> None:
    with pytest.raises(Refused, match="has just ended"):
        bench.begin(0, 7)


@pytest.mark.parametrize("trick", ["link", "hard link", "folder", "another owner"])
def test_only_a_regular_file_of_the_process_is_taken(tmp_path: Path, trick: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(TRACE)
    path = tmp_path / "a.json"
    owner = UID
    if trick == "link":
        path.symlink_to(secret)
    elif trick == "hard link":
        path.hardlink_to(secret)
    elif trick == "folder":
        path.mkdir()
    else:
        path.write_bytes(TRACE)
        owner = UID + 1
    file = TraceFile(tmp_path, "a.json", owner)
    file.look(0.0)
    file.look(1.0)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InboxError, match=r"a\.json"):
        file.take(tmp_path / "taken")
    assert len(os.listdir("/proc/self/fd")) == opened
    assert not (tmp_path / "taken").exists()
    assert secret.read_bytes() == TRACE
