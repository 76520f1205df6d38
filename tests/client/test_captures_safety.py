"""Each reason against a capture, beside a torch that is a stand-in where a GPU would be needed."""

import json
import os
import re
import sys
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.client.daemon_side import Folder
from tests.client.fork_server import ROOT
from tests.client.simulated_cuda import situation, torch
from tests.conftest import Cases
from tests.manual_clock import ManualClock
from warpwatch import protocol
from warpwatch.captures.control import Captures
from warpwatch.captures.recording import (
    Command,
    EventBudget,
    RecordingSession,
    open_commands,
    parse_command,
)
from warpwatch.captures.safety import refusal
from warpwatch.captures.safety import unsafe_stacks as unsafe
from warpwatch.rendezvous import inbox_problem
from warpwatch.ring import RingWriter
from warpwatch.steps import StepClock

CLIENT = ROOT / "client" / "warpwatch"
SUBSCRIBERS = ("nvidia_resiliency_ext.attribution.straggler", "gpufl", "cupti")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # Inductor's trees of graphs are graphs.
        ("torch._inductor.cudagraph_trees", "cuda_graphs"),
        *((name, f"cupti_busy: {name} is loaded") for name in SUBSCRIBERS),
        ("nvidia_resiliency_ext.straggler_of_ours", None),
    ],
)
def test_a_module_speaks_against_a_capture(
    name: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert refusal(situation(torch())) == reason


def test_stacks_are_refused_where_they_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = situation(torch(), options=("stacks",))
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert unsafe(asked) == "unsafe_stacks"
    assert unsafe(situation(torch())) is None
    for version in ("2.8.0+cpu", "2.10.1", "a nightly build"):
        newer = torch()
        newer.__version__ = version
        assert unsafe(situation(newer, options=("stacks",))) is None
    monkeypatch.setattr(sys, "version_info", (3, 12, 9))
    assert unsafe(asked) is None


def test_every_reason_is_in_the_document_and_the_other_way_round() -> None:
    document = (ROOT / "docs" / "protocol.md").read_text()
    section = document.split("## Refusals and interruptions")[1].split("A recording capture")[0]
    reported = {
        word
        for row in re.findall(r"^\| (`.*?) \|", section, re.M)
        for word in re.findall(r"`(\w+)", row)
    }
    source = "".join(
        (CLIENT / name).read_text() for name in ("captures/safety.py", "rendezvous.py")
    )
    returned = re.findall(r"^ +(?:return|reason =) (.*)$", source, re.M)
    reason = re.compile(r'(?:^|else )f?"(\w+)[:"]')
    found = {word for line in returned for word in reason.findall(line)}
    assert reported - {"detail"} == found


def test_a_command_has_the_options_that_are_known_and_values_within_their_limits(
    cases: Cases,
) -> None:
    """What is no command of a session is None; what is wrong with a capture leaves its kind out."""
    good = {"op": "capture", "id": "c-1", "kind": "torch", "start_step": 40, "steps": 2}
    cases("client/commands.txt", lambda text: parse_command(good | json.loads(text)))


@pytest.mark.parametrize("damage", ["", "size", "link", "pipe", "foreign"])
def test_only_a_command_file_of_the_daemon_is_opened(damage: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.command("one", op="none")
    path, made = folder.path / "commands" / "one.cmd", tmp_path / "made"
    if damage == "size":
        path.write_bytes(path.read_bytes() + b"\0")
    elif damage in ("link", "pipe"):
        path.rename(made)
        path.symlink_to(made) if damage == "link" else os.mkfifo(path)
    fd = os.open(folder.path, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    found = open_commands(fd, "one", os.geteuid() + (damage == "foreign"))
    assert (found >= 0) == (damage == "")
    assert len(os.listdir("/proc/self/fd")) <= before + (found >= 0)
    for opened in (fd, *([found] if found >= 0 else [])):
        os.close(opened)


@pytest.mark.parametrize("text", ["", "["])
def test_a_command_file_that_stays_torn_is_given_up(
    ring: RingWriter, tmp_path: Path, text: str
) -> None:
    """One whose text has too many levels is like a torn one."""
    path = tmp_path / "torn.cmd"
    data = json.dumps("x" * 4000).encode() if not text else text.encode() * 4000
    crc = zlib.crc32(data, zlib.crc32((7).to_bytes(8, "little"))) ^ (not text)
    head = protocol.COMMAND.pack(protocol.COMMAND_MAGIC, 7, len(data), crc)
    path.write_bytes((head + data).ljust(protocol.COMMAND_SIZE, b"\0"))
    ring.open_commands(os.open(path, os.O_RDONLY))
    captures, clock, reads = Captures(), StepClock(), 0
    while ring.command_seen == bytes(8):
        captures.follow(clock, ring, reads)
        reads += 1
    assert reads == 100
    assert ring.lost_commands() is None
    path.unlink()
    lost = ring.lost_commands()
    assert lost is not None and (ring.command_fd, ring.lost_commands()) == (-1, None)
    lost.close()


@pytest.mark.parametrize(
    ("free_mib", "total_mib", "problem"),
    [(200, 500, None), (199, 400, "no_space"), (200, 501, "no_space")],
)
def test_an_inbox_keeps_twice_a_capture_and_a_fifth_free(
    free_mib: int, total_mib: int, problem: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    disk = SimpleNamespace(f_bavail=free_mib << 20, f_blocks=total_mib << 20, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    assert inbox_problem(str(tmp_path)) == problem


class Said:
    """A ring that keeps its events, and a recorder that does nothing."""

    name, events, size_bytes = "ring", 0, 0

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def event(self, event: str, id: str, detail: str = "", **_: Any) -> None:
        self.said.append((event, detail))

    def stop(self, about: dict[str, Any]) -> None:
        self.about = about

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def recording(
    clock: ManualClock, steps: int = 2, kind: str = "torch"
) -> tuple[RecordingSession, Said]:
    said: Any = Said()
    command = Command("capture", "c-1", kind, 40, steps)
    return RecordingSession(command, said, "", said, 30, clock.monotonic), said


def test_a_start_step_that_does_not_begin_in_time_disarms_once() -> None:
    clock = ManualClock()
    session, said = recording(clock)
    clock.advance(60.0)
    session.expire()
    assert said.said == []
    clock.advance(0.1)
    session.expire()
    session.expire()
    assert said.said == [("capture_disarmed", "start step did not begin in time")]


def test_a_capture_whose_step_before_the_first_was_missed_is_disarmed() -> None:
    captures = Captures()
    captures.session, said = recording(ManualClock())
    clock: Any = SimpleNamespace(capturing=True, flags=0)
    without_commands: Any = SimpleNamespace(command_fd=-1)
    for number in (38, 40):
        captures.follow(clock, without_commands, number)
    assert said.said == [("capture_disarmed", "the step before the first was not seen")]


def test_the_work_of_the_recorded_iterations_goes_into_the_trace() -> None:
    captures = Captures()
    captures.inbox_problem = None
    session, said = recording(ManualClock(), kind="memory")
    captures.session = session
    clock: Any = SimpleNamespace(capturing=True, flags=0, work=(38, 0, 0))
    without_commands: Any = SimpleNamespace(command_fd=-1)
    for number in range(39, 43):
        captures.follow(clock, without_commands, number)
        clock.work = (number, 0, 0)
        captures.step_ended(clock, number)
    about = {"first_step": 40, "last_step": 41, "iterations": [(40, 0, 0), (41, 0, 0)]}
    assert said.about == about
    assert (session.begun, captures.exporting, captures._taken) == (True, True, 1)
    # With fewer than 50 captures there may be another; without it, the steps are as ever.
    assert (clock.flags, clock.capturing) == (0, False)


def test_what_cannot_be_delivered_is_answered_and_every_file_discarded() -> None:
    captures, discarded, answers = Captures(), list[str](), list[Any]()
    captures._exports = 6
    cases = ((0, None), (None, None), (1, OSError("full")), (1, ("shapes",)), (1, None), (1, True))
    for links, how in cases:
        session, said = recording(ManualClock())
        error = how if isinstance(how, OSError) else None
        session.dropped = how is True
        session.command = session.command._replace(options=how if isinstance(how, tuple) else ())
        vars(said).update(links=Mock(return_value=links), discard=discarded.append)
        vars(said).update(deliver=Mock(return_value={}, side_effect=error), size_bytes=7 << 30)
        vars(said).update(events=100 if how is None else 400)
        captures.exported.put(session)
        captures.deliver(Mock())
        answers += said.said
    assert answers == [
        *[("capture_failed", "the ring was removed")] * 2,
        ("capture_failed", "OSError: full"),
        *[("capture_finished", "")] * 2,
    ]
    assert (captures.exporting, discarded) == (False, ["c-1.ring"] * 6)
    # A capture with options tells nothing about the size of others.
    assert (captures.budget.events_per_step, captures.estimate_bytes) == (50, 7 << 30)
    # Nobody hears an answer on a ring that was closed.
    session, said = recording(ManualClock())
    vars(said)["event"] = Mock(side_effect=ValueError)
    assert [session.answer("capture_finished"), session.answer("capture_finished")] == [True, False]


@pytest.mark.parametrize(("task", "is_stopped"), [(0, False), (-1, True)])
def test_a_late_recording_is_not_stopped_inside_of_a_backward(
    task: int, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = SimpleNamespace(_current_graph_task_id=lambda: task)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=graph))
    captures, pushed, clock = Captures(), list[Any](), SimpleNamespace(push=None)
    captures.session, _ = recording(ManualClock())
    captures.session.enter()
    captures._stop_late(clock, captures.session, pushed.append, "entry")
    assert pushed == ["entry"]
    assert ((captures.session is None), (clock.push is not None)) == (is_stopped, is_stopped)


@pytest.mark.parametrize(("step_s", "steps", "limit_s"), [(0.1, 2, 30.0), (5.0, 2, 60.0)])
def test_a_recording_may_take_twice_its_steps(step_s: float, steps: int, limit_s: float) -> None:
    clock = ManualClock()
    session, said = recording(clock, steps)
    # Nine steps to the lead-in.
    clock.advance(9 * step_s)
    session.enter()
    session.prepare()
    session.start()
    session.begun = True
    assert session.limit_s == pytest.approx(limit_s)
    clock.advance(limit_s - 0.1)
    session.expire()
    assert said.said == []
    clock.advance(0.2)
    session.expire()
    session.disarm("cancelled after its answer")
    why = f"interrupted: the recording took longer than {limit_s:.0f} s"
    assert said.said == [("capture_failed", why)]


def test_the_programs_profiler_waits_for_a_thread_that_does_not_come_by_up_to_a_limit() -> None:
    clock, said = ManualClock(), list[str]()
    captures = Captures(clock.monotonic, clock.sleep)
    command = Command("capture", "c-1", "torch", 40, 2)
    session: Any = SimpleNamespace(
        command=command, prepared=True, here=False, lives=True, fail=said.append
    )
    captures.session = session
    captures.give_way()
    assert said == ["the program's own profiler began"]
    assert sum(clock.slept) == pytest.approx(30, abs=0.01)
    # A thread that has ended comes by no more; others than torch's are not in its way.
    memory = command._replace(kind="memory")
    changes: list[dict[str, Any]] = [{"lives": False}, {"prepared": False}, {"command": memory}]
    for change in changes:
        vars(session).update({"lives": True, "prepared": True, "command": command, **change})
        captures.give_way()
    assert len(said) == 2 and sum(clock.slept) == pytest.approx(30, abs=0.01)


# An operator has 25 events, and 40 on a GPU, until a capture has shown how many.
@pytest.mark.parametrize(("cuda", "events"), [(False, 1000), (True, 1600)])
def test_the_budget_follows_autograds_counter(cuda: bool, events: int, monkeypatch: Any) -> None:
    counted, budget = torch(cuda=cuda), EventBudget()
    monkeypatch.setitem(sys.modules, "torch", counted)

    def sampled(number: int, counter: int) -> int | None:
        counted.autograd._get_sequence_nr = lambda: counter
        budget.sample(number)
        return budget.events_per_step

    assert [sampled(0, 1000), sampled(1, 1040)] == [None, events]
    # A capture of two steps, in which the counter rose by 80, had 2,400 events.
    budget.learn(2400, 2, 80)
    assert budget.events_per_step == 1200
    assert sampled(32, 1040 + 31 * 80) == 2400
    # Another thread has a counter of its own.
    assert sampled(48, 5) == 2400
    # Without gradients what was measured holds.
    assert sampled(64, 5) == 1200
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert sampled(80, 5) == 1200
