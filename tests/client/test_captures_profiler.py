"""The program's own torch.profiler beside a capture: ours gives way, theirs gets a whole trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.client.daemon_side import Folder, eventually, program
from tests.client.training import (
    begun,
    capture,
    captured,
    event,
    events,
    files,
    names,
    running,
    training,
)

pytestmark = pytest.mark.torch

# The program profiles when a file says how: its content names the class, its removal ends it.
OWN = """
import os
from torch.profiler import ProfilerActivity, profile, schedule
own, asked = None, sys.argv[1]
def begin(how):
    activities = [ProfilerActivity.CPU]
    if how == "profile":
        made = profile(activities=activities)
    elif how == "warm-up":
        made = profile(activities=activities, schedule=schedule(wait=0, warmup=1000, active=1))
    elif how == "autograd":
        made = torch.autograd.profiler.profile(use_kineto=True)
    made.__enter__()
    return made
def inside(number):
    global own
    wanted = os.path.exists(asked)
    if wanted and own is None:
        own = begin(open(asked).read())
        torch.ones(3).cos()
        open(asked + ".began", "w").close()
    elif own is not None and not wanted:
        torch.ones(3).sin()
        own.__exit__(None, None, None)
        own.export_chrome_trace(asked + ".json")
        own = None
        os.unlink(asked + ".began")
"""


def say(path: Path, how: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(how)
    part.rename(path)
    eventually(path.with_name(path.name + ".began").exists)


def recorded(folder: Folder, steps: int) -> None:
    enough = begun(folder) + steps
    eventually(lambda: begun(folder) > enough)


def unsay(path: Path) -> None:
    path.unlink()
    eventually(lambda: not path.with_name(path.name + ".began").exists())


def test_ours_is_refused_while_theirs_warms_up_or_records(folder: Folder, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with program(folder, training(OWN), str(asked)):
        running(folder)
        for how in ("profile", "warm-up", "autograd"):
            say(asked, how)
            capture(folder, start=10**6, id=how)
            assert event(folder, "capture_failed", how)["detail"] == "profiler_busy"
            unsay(asked)
        capture(folder, begun(folder) + 30, id="after")
        assert "aten::addmm" in names(captured(folder, "after"))


def test_ours_ends_when_theirs_begins_and_theirs_is_whole(folder: Folder, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with program(folder, training(OWN), str(asked)) as process:
        running(folder)
        for how in ("profile", "autograd"):
            capture(folder, begun(folder) + 30, steps=100, id=how)
            event(folder, "capture_started", how)
            say(asked, how)
            failed = event(folder, "capture_failed", how)
            assert failed["detail"] == "the program's own profiler began"
            recorded(folder, steps=5)
            unsay(asked)
            theirs = json.loads(asked.with_name("asked.json").read_text())
            assert {"aten::cos", "aten::addmm", "aten::sin"} <= names(theirs)
            assert [found["event"] for found in events(folder, how)] == [
                *("capture_armed", "capture_started", "capture_failed"),
            ]
        assert process.poll() is None
        assert files(folder) == []


def test_a_schedule_that_comes_to_its_warm_up_ends_ours(folder: Folder, tmp_path: Path) -> None:
    traced = tmp_path / "traced.json"
    define = f"""
from torch.profiler import ProfilerActivity, profile, schedule
own = profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=400, warmup=5, active=3, repeat=1),
    on_trace_ready=lambda own: own.export_chrome_trace({str(traced)!r}),
)
own.start()
def inside(number):
    own.step()
"""
    with program(folder, training(define)) as process:
        running(folder)
        # While theirs waits for its turn ours is free to record.
        start = begun(folder) + 30
        capture(folder, start)
        assert event(folder, "capture_finished")["first_step"] == start
        capture(folder, 390, steps=100, id="c-2")
        failed = event(folder, "capture_failed", "c-2")
        assert failed["detail"] == "the program's own profiler began"
        eventually(traced.exists)
        eventually(lambda: begun(folder) > 420)
        theirs = names(json.loads(traced.read_text()))
        assert {f"ProfilerStep#{number}" for number in (405, 406, 407)} <= theirs
        assert process.poll() is None


def test_a_profiler_in_another_thread_waits_until_ours_has_ended(
    folder: Folder, tmp_path: Path
) -> None:
    asked, traced = tmp_path / "asked", tmp_path / "traced.json"
    define = f"""
import os, threading
from torch.profiler import ProfilerActivity, profile
def beside():
    while not os.path.exists({str(asked)!r}): time.sleep(0.01)
    with profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(3).tan()
    own.export_chrome_trace({str(traced)!r})
threading.Thread(target=beside, daemon=True).start()
def inside(number):
    # A hundred steps last longer than a busy machine takes to begin another profiler.
    time.sleep(0.05)
"""
    with program(folder, training(define)) as process:
        running(folder)
        start = begun(folder) + 30
        capture(folder, start, steps=100)
        eventually(lambda: begun(folder) > start)
        asked.touch()
        assert event(folder, "capture_failed")["detail"] == "the program's own profiler began"
        eventually(traced.exists)
        recorded(folder, steps=5)
        assert process.poll() is None
        assert "aten::tan" in traced.read_text()
        capture(folder, begun(folder) + 30, id="after")
        assert "aten::addmm" in names(captured(folder, "after"))
