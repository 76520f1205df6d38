"""Captures by command, in a real process with a real torch.profiler."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.daemon_side import Folder, Ring, eventually, program
from tests.client.training import event, events, files, running
from warpwatch.protocol import FLAG_PROFILED

PLAIN = """
import sys, time
import warpwatch
monitor = warpwatch.attach(job="demo")
period_s = float(sys.argv[1])
while True:
    with monitor.step():
        time.sleep(period_s)
"""
TORCH = """
import sys, time, warnings
import torch
# From here on: without numpy, torch itself warns while it is imported.
warnings.simplefilter("error")
import warpwatch
torch.set_num_threads(1)
monitor = warpwatch.attach(job="demo")
period_s = float(sys.argv[1])
steps = 0
while steps != int(sys.argv[2]):
    with monitor.step():
        with monitor.phase("forward"):
            torch.ones(64, 64).mm(torch.ones(64, 64))
        time.sleep(period_s)
    steps += 1
"""


def capture(folder: Folder, ring: Ring, start: int, steps: int = 2, **more: Any) -> None:
    fields = {"op": "capture", "id": "c-1", "kind": "torch", "arm_timeout_s": 60, **more}
    folder.command(ring.name, start_step=start, steps=steps, **fields)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """One training for several tests; each has captures of its own."""
    folder = Folder(tmp_path_factory.mktemp("node") / "warpwatch")
    with folder.held(), program(folder, TORCH, "0.02", "-1"):
        yield folder


@pytest.mark.torch
def test_a_capture_brings_the_steps_that_were_asked_for(training: Folder) -> None:
    ring = running(training)
    start = (ring.header.step_begun or 0) + 30
    capture(training, ring, start, steps=3)
    token = event(training, "capture_finished")["token"]
    name = f"c-1.{ring.name}.{token}.pt.trace.json.gz"
    reported = {"token": token, "first_step": start, "last_step": start + 2}
    assert events(training, "c-1") == [
        {"event": "capture_armed", "id": "c-1", "step": start},
        {"event": "capture_started", "id": "c-1", "step": start},
        {"event": "capture_finished", "id": "c-1", **reported},
    ]
    assert files(training) == [name]
    path = training.path / "inbox" / name
    assert path.stat().st_mode & 0o777 == 0o644
    trace = json.loads(gzip.decompress(path.read_bytes()))
    about = {"rank": 0, "job": "demo", "world_size": 1}
    # Which pauses of the collector fell into it is not ours to say.
    trace["warpwatch"].pop("gc_pauses_us", None)
    assert trace["warpwatch"] == {**about, "first_step": start, "last_step": start + 2}
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 1}
    names = {event.get("name", "") for event in trace["traceEvents"]}
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{number}" for number in range(start, start + 3)}
    assert "aten::mm" in names
    eventually(lambda: training.ring().header.totals.steps > start + 8)
    flagged = [step[0] for step in training.ring().steps if step[-1] & FLAG_PROFILED]
    # The lead-in, the three, and the one that paid for the export.
    assert flagged == list(range(start - 1, start + 4))
    path.unlink()


@pytest.mark.torch
def test_a_command_that_comes_too_late_is_answered_and_does_nothing(training: Folder) -> None:
    ring = running(training)
    capture(training, ring, start=1, id="late")
    assert event(training, "capture_late", "late")["step"] > 1
    later = training.ring().header.totals.steps + 10
    eventually(lambda: training.ring().header.totals.steps > later)
    assert len(events(training, "late")) == 1


@pytest.mark.torch
def test_cancel_and_another_capture_disarm(training: Folder) -> None:
    ring = running(training)
    capture(training, ring, start=10**6, id="cancelled")
    event(training, "capture_armed", "cancelled")
    training.command(ring.name, op="cancel", id="cancelled")
    assert event(training, "capture_disarmed", "cancelled")["detail"] == "cancelled"
    capture(training, ring, start=10**6, id="replaced")
    event(training, "capture_armed", "replaced")
    begun = training.ring().header.step_begun or 0
    capture(training, ring, start=begun + 20, steps=1, id="newer")
    event(training, "capture_finished", "newer")
    replaced = event(training, "capture_disarmed", "replaced")
    assert replaced["detail"] == "another capture was asked for"


@pytest.mark.torch
def test_a_profiler_that_runs_is_dropped_on_cancel(training: Folder) -> None:
    ring = running(training)
    start = (ring.header.step_begun or 0) + 10
    capture(training, ring, start, steps=100, id="dropped")
    event(training, "capture_started", "dropped")
    training.command(ring.name, op="cancel", id="dropped")
    event(training, "capture_disarmed", "dropped")
    begun = (training.ring().header.step_begun or 0) + 20
    capture(training, ring, begun, steps=1, id="after")
    assert event(training, "capture_finished", "after")["first_step"] == begun
    assert events(training, "dropped")[-1]["event"] == "capture_disarmed"


@pytest.mark.torch
def test_a_program_that_ends_right_after_still_hands_over(folder: Folder) -> None:
    with program(folder, TORCH, "0.01", "150") as process:
        ring = running(folder)
        start = (ring.header.step_begun or 0) + 60
        capture(folder, ring, start, steps=150 - start)
        assert process.communicate(timeout=60)[0] == ""
    reported = [name for name in folder.ring().event_names() if name != "gc_pause"]
    assert reported == ["capture_armed", "capture_started", "capture_finished", "exit"]
    assert len(files(folder)) == 1


@pytest.mark.torch
def test_a_program_that_ends_before_the_last_step_says_so(folder: Folder) -> None:
    with program(folder, TORCH, "0.01", "150") as process:
        ring = running(folder)
        capture(folder, ring, start=(ring.header.step_begun or 0) + 70, steps=100)
        process.communicate(timeout=60)
        assert process.returncode == 0
    (*_, failed), end = events(folder, "c-1"), folder.ring().events[-1]
    assert failed == {"event": "capture_failed", "id": "c-1", "detail": "the process exits"}
    assert end == {"event": "exit"}
    assert files(folder) == []


def test_a_process_without_torch_refuses(folder: Folder) -> None:
    with program(folder, PLAIN, "0.005"):
        ring = running(folder)
        capture(folder, ring, start=10**6)
        assert event(folder, "capture_failed")["detail"] == "no_torch"
        capture(folder, ring, start=10**6, id="c-2", kind="vtune")
        eventually(lambda: len(folder.ring().events) == 2)
    assert folder.ring().events[1] == {
        "event": "capture_failed",
        "id": "c-2",
        "detail": "unknown_kind",
    }


@pytest.mark.torch
def test_no_inbox_is_a_refusal(folder: Folder) -> None:
    (folder.path / "inbox").rmdir()
    with program(folder, TORCH, "0.005", "-1"):
        ring = running(folder)
        assert ring.metadata["inbox_ok"] is False
        capture(folder, ring, start=10**6)
        assert event(folder, "capture_failed")["detail"] == "no_inbox"


@pytest.mark.torch
def test_a_start_step_that_does_not_come_disarms_though_the_thread_is_stuck(folder: Folder) -> None:
    code = TORCH.replace("    steps += 1", "    steps += 1\n    if steps > 60: time.sleep(60)")
    with program(folder, code, "0.01", "-1"):
        ring = running(folder)
        capture(folder, ring, start=10**6, arm_timeout_s=1)
        event(folder, "capture_armed")
        assert event(folder, "capture_disarmed") == {
            "event": "capture_disarmed",
            "id": "c-1",
            "detail": "start step did not begin in time",
        }


def test_stacks_are_served_while_the_training_is_stuck(folder: Folder) -> None:
    code = PLAIN.replace(
        "time.sleep(period_s)", "stuck() if monitor.clock.ring else time.sleep(0.002)"
    ).replace("while True", "def stuck():\n    time.sleep(60)\nwhile True")
    with program(folder, code, "0"):
        ring = eventually(folder.rings)[0]
        folder.command(ring.name, op="capture", id="s-1", kind="stacks", start_step=0, steps=1)
        token = event(folder, "capture_finished", "s-1")["token"]
        name = f"s-1.{ring.name}.{token}.stacks.json"
        assert folder.ring().event_names() == ["capture_started", "capture_finished"]
        found = json.loads((folder.path / "inbox" / name).read_text())
    assert (found["rank"], found["job"], found["via"]) == (0, "demo", "helper")
    (main,) = [thread for thread in found["threads"] if thread["main"]]
    assert [frame["function"] for frame in main["frames"]] == ["<module>", "stuck"]
    assert "warpwatch" in {thread["name"] for thread in found["threads"]}


@pytest.mark.parametrize(
    "damage", ["size", "link", "pipe", "garbage", "bad id", "bad steps", "foreign"]
)
def test_a_command_file_that_is_not_the_daemons_is_not_obeyed(folder: Folder, damage: str) -> None:
    with program(folder, PLAIN, "0.002"):
        ring = running(folder)
        path = folder.path / "commands" / f"{ring.name}.cmd"
        fields: dict[str, Any] = {"op": "capture", "id": "x", "kind": "torch", "start_step": 10**6}
        fields["id"] = "../x" if damage == "bad id" else "x"
        fields["steps"] = 10**9 if damage == "bad steps" else 1
        made = folder.path / "made"
        folder.command("made", **fields)
        (folder.path / "commands" / "made.cmd").rename(made)
        data = made.read_bytes()
        if damage == "size":
            made.write_bytes(data + b"\0")
        elif damage == "garbage":
            made.write_bytes(data[:40] + b"\xff" * 40 + data[80:])
        elif damage == "foreign":
            _give_away(made)
        if damage == "link":
            path.symlink_to(made)
        elif damage == "pipe":
            _make_pipe(path)
        else:
            made.rename(path)
        steps = folder.ring().header.totals.steps
        eventually(lambda: folder.ring().header.heartbeat_ns - ring.header.heartbeat_ns > 0.6e9)
        assert folder.ring().header.totals.steps > steps
    answered = {"event": "capture_failed", "id": "x", "detail": "bad_command"}
    assert folder.ring().events == ([answered] if damage == "bad steps" else [])


def _give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    os.chown(path, 12345, 12345)


def _make_pipe(path: Path) -> None:
    os.mkfifo(path)
