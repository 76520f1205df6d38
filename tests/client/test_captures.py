"""Captures by command: what is answered, and what is left behind."""

from collections.abc import Iterator

import pytest

from tests.client.daemon_side import Folder
from tests.client.fork_server import ForkServer
from tests.client.training import Training, names, training
from tests.waiting import eventually
from warpwatch.protocol import FLAG_PROFILED

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = Folder(tmp_path_factory.mktemp("node") / "warpwatch")
    with folder.held(), training(folder) as found:
        yield found


def test_a_capture_brings_the_steps_that_were_asked_for(trained: Training) -> None:
    start = trained.capture("whole", steps=3)
    trained.steps(8)
    path = trained.handed_over("whole")
    token = trained.event("capture_finished", "whole")["token"]
    assert path.name == f"whole.{trained.folder.ring().name}.{token}.pt.trace.json.gz"
    steps = {"first_step": start, "last_step": start + 2}
    assert trained.events("whole") == [
        {"event": "capture_armed", "id": "whole", "step": start},
        {"event": "capture_started", "id": "whole", "step": start},
        {"event": "capture_finished", "id": "whole", "token": token, **steps},
    ]
    # The folder of the export goes after the event.
    eventually(lambda: [n for n in trained.files() if n.startswith("whole")] == [path.name])
    assert path.stat().st_mode & 0o777 == 0o644
    trace = trained.captured("whole")
    # The pauses of the collector in it vary.
    trace["warpwatch"].pop("gc_pauses_us", None)
    assert trace["warpwatch"] == {"rank": 0, "job": "demo", "world_size": 1, **steps}
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 1}
    recorded = {name for name in names(trace) if name.startswith("ProfilerStep#")}
    assert recorded == {f"ProfilerStep#{number}" for number in range(start, start + 3)}
    assert "aten::addmm" in names(trace)
    eventually(lambda: trained.folder.ring().header.totals.steps == trained.number)
    flagged = [step[0] for step in trained.folder.ring().steps if step[-1] & FLAG_PROFILED]
    # The lead-in, the three, and the one that paid for the export.
    mine = [number for number in flagged if start - 1 <= number]
    assert mine == list(range(start - 1, start + 4))


def test_a_command_that_comes_too_late_is_answered_and_does_nothing(trained: Training) -> None:
    began = trained.number
    trained.capture("late", start=began)
    trained.steps(5)
    late = {"event": "capture_late", "id": "late", "step": began}
    assert trained.event("capture_late", "late") == late
    assert len(trained.events("late")) == 1


def test_cancel_and_another_capture_disarm(trained: Training) -> None:
    for id in ("cancelled", "replaced"):
        for _ in range(2):
            trained.capture(id, start=10**6)
            trained.steps(1)
        trained.event("capture_armed", id)
        trained.cancel("another")
        trained.steps(1)
        if id == "cancelled":
            trained.cancel(id)
            trained.steps(1)
    trained.works("newer")
    assert trained.names("replaced") == ["capture_armed", "capture_disarmed"]
    assert trained.detail("cancelled", "capture_disarmed") == "cancelled"
    why = "another capture was asked for"
    assert trained.detail("replaced", "capture_disarmed") == why


def test_a_profiler_that_runs_is_dropped_on_cancel(trained: Training) -> None:
    trained.record("dropped")
    trained.cancel("dropped")
    trained.event("capture_disarmed", "dropped")
    trained.steps(1)
    trained.works("after-cancel")
    assert trained.names("dropped")[-1] == "capture_disarmed"
    # One that is prepared, in the step before its first.
    trained.capture("led-in")
    trained.steps(1)
    wait = "wait(lambda: monitor.clock.captures.session.dropped)"
    trained.request(1, f"assert monitor.clock.flags; print(0, flush=True); {wait}")
    trained._read()
    trained.cancel("led-in")
    trained._read()
    trained.works("after-led-in")
    trained.record("replaced-2")
    trained.works("after-replaced")
    assert trained.names("replaced-2")[-1] == "capture_disarmed"
    # The program can import the same as the profiler, and the collector calls nothing.
    trained.steps(
        1,
        "import gc; assert not [one for one in gc.callbacks if '_Pauses' in repr(one)]\n"
        "assert '_inductor' in torch._lazy_modules or 'torch._inductor' in sys.modules",
    )


def test_a_program_that_then_ends_still_hands_over(folder: Folder, with_torch: ForkServer) -> None:
    # The helper thread does not come by before the end.
    with training(folder, with_torch, "helper_thread.HEARTBEAT_INTERVAL_S = 3600") as found:
        found.capture()
        found.steps(4)
        found.end()
    assert found.names() == ["capture_armed", "capture_started", "capture_finished"]
    assert folder.ring().event_names()[-1] == "exit"
    assert len(found.files()) == 1


def test_a_process_without_torch_refuses(plain: Training) -> None:
    for id, kind, reason in (("t-1", "torch", "no_torch"), ("v-1", "vtune", "unknown_kind")):
        plain.capture(id, kind=kind)
        plain.steps(1)
        assert plain.detail(id) == reason
        assert plain.names(id) == ["capture_failed"]


def test_no_inbox_is_a_refusal(folder: Folder, with_torch: ForkServer) -> None:
    (folder.path / "inbox").rmdir()
    with training(folder, with_torch) as found:
        assert folder.ring().metadata["inbox_ok"] is False
        found.capture()
        found.steps(1)
        assert found.detail() == "no_inbox"
        found.capture("s-1", kind="stacks", start=1, steps=1)
        assert found.detail("s-1") == "no_inbox"


def test_stacks_are_served_while_the_training_is_stuck(plain: Training) -> None:
    plain.request(1, "def stuck():\n  print(number, flush=True)\n  sys.stdin.readline()\nstuck()")
    plain._read()
    found = plain.stacks("s-1")
    plain.request(0)
    plain._read()
    plain.steps(1)
    assert plain.names("s-1") == ["capture_started", "capture_finished"]
    assert (found["rank"], found["job"], found["via"]) == (0, "demo", "helper")
    (main,) = [thread for thread in found["threads"] if thread["main"]]
    assert [frame["function"] for frame in main["frames"]] == [
        *("<module>", "serve", "train", "<module>", "stuck")
    ]
    assert "warpwatch" in {thread["name"] for thread in found["threads"]}
