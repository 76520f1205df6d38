"""The helper thread's rounds, one by one: what they write, follow, replace and close."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.client.daemon_side import Folder
from tests.client.simulated_cuda import torch
from tests.manual_clock import ManualClock
from warpwatch.captures import profilers
from warpwatch.helper_thread import HelperThread
from warpwatch.iterations import IterationClock
from warpwatch.monitor import Monitor
from warpwatch.steps import StepClock


@pytest.fixture
def helper(folder: Folder, clock: ManualClock) -> Iterator[HelperThread]:
    environ = folder.environment(
        WARPWATCH_GPU_UUID="GPU-1", WARPWATCH_ATTACH_INTERVAL_S="4000", WARPWATCH_CUDA_EVENTS="0"
    )
    found = HelperThread(Monitor(StepClock()), "demo", environ, clock.monotonic, clock.sleep)
    yield found
    profilers._active.add(clock)
    found.drop()
    assert (profilers.program_profiles(), profilers._listener) == (False, None)
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [path for path in opened if path.startswith(str(folder.path))]


def attach(helper: HelperThread) -> None:
    with helper.monitor.step():
        pass
    helper._round()


def test_a_round_reports_what_has_changed(
    helper: HelperThread, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper._round()
    assert folder.rings() == []
    monkeypatch.setitem(sys.modules, "torch", found := torch())
    attach(helper)
    assert folder.ring().header.step_begun == 0
    monitor, clock = helper.monitor, helper.clock
    clock.calls, clock.steps_elsewhere, clock.device = (lambda: 7), 1234, "GPU-2"
    monitor.place |= {"note": "late", "parallel": {"tensor": [1, 2]}}
    monitor.release("step()")
    with clock.ring._lock:
        clock.ring.event("deferred")
    for events, cuda in (("0", None), ("1", found.cuda)):
        helper._environ = {**helper._environ, "WARPWATCH_CUDA_EVENTS": events}
        helper._round()
        assert helper.clock.cuda is cuda
    assert helper._ring is not None and helper._ring._metadata == 2
    ring = folder.ring()
    reported = [ring.metadata[name] for name in ("device", "steps_elsewhere", "note", "inbox_ok")]
    assert reported == ["GPU-1", 1200, "late", True]
    # The last one is kept, and an interval of more than an hour is ignored.
    assert (ring.metadata["step_clock"], helper._interval_s) == ("step()", 5.0)
    assert (ring.header.calls, ring.header.step_begun) == (7, 0)
    known = {"rank": 0, "job": "demo", "world_size": 1, "parallel": {"tensor": [1, 2]}}
    assert (helper.captures.metadata, ring.event_names()) == (known, ["deferred"])


def test_the_end_of_training_is_reported_and_taken_back(
    helper: HelperThread, folder: Folder
) -> None:
    ended = []
    for thread in (Thread(target=partial(attach, helper)), None):
        if thread is not None:
            thread.start()
            thread.join()
        helper._round()
        ended.append(folder.ring().header.ended)
        attach(helper)
        ended.append(folder.ring().header.ended)
    assert ended == [True, False, False, False]


def test_a_command_that_is_being_written_is_read_later_and_a_lost_file_is_let_go(
    helper: HelperThread, folder: Folder, clock: ManualClock
) -> None:
    attach(helper)
    fields: dict[str, Any] = {"op": "capture", "kind": "stacks", "start_step": 1, "steps": 1}
    path = folder.path / "commands" / f"{folder.ring().name}.cmd"
    answers = ["capture_started", "capture_finished"]
    folder.command(path.stem, op="none")
    helper._round()
    before = path.read_bytes()
    folder.command(path.stem, id="s-1", **fields)
    whole = path.read_bytes()
    for data, events in ((whole[:16] + before[16:], []), (whole, answers), (whole, answers)):
        path.write_bytes(data)
        helper._round()
        assert folder.ring().event_names() == events
    path.unlink()
    helper._round()
    folder.command(path.stem, id="s-2", **fields)
    helper._round()
    assert folder.ring().event_names() == [*answers, *answers]
    # A new ring comes at once.
    (folder.path / "ranks" / f"{path.stem}.ring").unlink()
    helper._gil_stacks.close = closed = Mock()  # type: ignore[method-assign]
    for rings in (0, 1):
        helper._round()
        assert (len(folder.rings()), closed.called) == (rings, True)
    clock.advance(10)
    helper._round()


def test_stacks_need_an_inbox_with_room_and_every_ring_has_commands_of_its_own(
    helper: HelperThread, folder: Folder, clock: ManualClock
) -> None:
    def ask(kind: str = "stacks") -> list[str]:
        name = helper._ring.name
        folder.command(name, op="capture", id="s-1", kind=kind, start_step=1, steps=1)
        helper._round()
        return [event.get("detail", event["event"]) for event in rings()[name].events]

    def rings() -> dict[str, Any]:
        return {ring.name: ring for ring in folder.rings()}

    attach(helper)
    assert ask() == ["capture_started", "capture_finished"]
    assert helper._attached == clock.monotonic()
    helper.captures.estimate_bytes = 1 << 60
    for passed_s, inbox_ok in ((4.9, True), (0.1, False)):
        clock.advance(passed_s)
        helper._round()
        (ring,) = rings().values()
        assert ring.metadata["inbox_ok"] == inbox_ok
    assert ask()[2:] == ["capture_started", "no_space"]
    # Another's capture is not for this thread.
    assert ask("torch")[4:] == []
    first = helper._ring
    said: list[str] = []
    session: Any = SimpleNamespace(ring=first, disarm=said.append, dropped=False, expire=lambda: 0)
    helper.captures.session = session
    os.unlink(folder.path / "ranks" / f"{ring.name}.ring")
    helper._round()
    helper.captures.session = None
    assert (said, helper.clock.ring) == (["the ring was removed"], None)
    helper._round()
    (new,) = rings()
    assert new != ring.name
    assert ask() == ["capture_started", "capture_finished"]
    # The training thread may be about to use the old one.
    for passed_s, links in ((9.9, 0), (0.2, None)):
        assert first is not None
        clock.advance(passed_s)
        helper._round()
        assert first.links() == links


def test_the_end_waits_5_s_for_an_export_and_writes_what_is_left(
    folder: Folder, clock: ManualClock
) -> None:
    monitor = Monitor(IterationClock())
    helper = HelperThread(monitor, "demo", folder.environment(), clock.monotonic, clock.sleep)
    helper._round()
    assert monitor.serving is not None
    monitor.serving.prompt_tokens, monitor.serving._written_ns = 5, 0
    helper._round()
    monitor.serving.prompt_tokens = 7
    for _ in range(2):
        with monitor.iteration():
            pass
    monitor.place["note"] = "late"
    helper.captures._exports = 1
    helper.finish(5.0)
    ring = folder.ring()
    assert sum(clock.slept) == pytest.approx(5, abs=0.03)
    assert ([second[8] for second in ring.seconds], len(ring.works)) == ([5, 2], 2)
    assert (ring.metadata["note"], ring.event_names()) == ("late", ["exit"])
    assert (ring.header.ended, ring.header.step_begun) == (True, 1)
    # Nothing is armed any more.
    assert helper.captures._refusal(None) == "the process exits"  # type: ignore[arg-type]
    helper.drop()
