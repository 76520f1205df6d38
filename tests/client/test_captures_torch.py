"""Kind torch in a real training: options, interruptions, errors, the event budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    handed_over,
    names,
    running,
    training,
)
from warpwatch_diagnosis.trace.reader import read_trace

pytestmark = pytest.mark.torch

# The training runs the text of a file, once, inside a step.
OBEDIENT = """
import os
asked = sys.argv[1]
def inside(number):
    if os.path.exists(asked):
        text = open(asked).read()
        os.unlink(asked)
        exec(text, globals())
"""


class Training:
    """A process that trains, and what it is made to do on the way."""

    def __init__(self, folder: Folder, asked: Path) -> None:
        self.folder = folder
        self._asked = asked

    def run(self, text: str) -> None:
        """Inside a step, before this returns."""
        part = self._asked.with_suffix(".part")
        part.write_text(text)
        part.rename(self._asked)
        eventually(lambda: not self._asked.exists())

    def record(self, identifier: str, **more: object) -> None:
        """Begin a capture that does not end by itself soon; returns when it records."""
        start = begun(self.folder) + 40
        capture(self.folder, start, steps=100, id=identifier, **more)
        event(self.folder, "capture_started", identifier)
        eventually(lambda: begun(self.folder) > start)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    path = tmp_path_factory.mktemp("node")
    folder = Folder(path / "warpwatch")
    with folder.held(), program(folder, training(OBEDIENT), str(path / "asked")):
        running(folder)
        yield Training(folder, path / "asked")


def test_options_are_recorded_and_only_when_asked_for(trained: Training) -> None:
    folder = trained.folder
    capture(folder, begun(folder) + 40, id="plain")
    plain = captured(folder, "plain")
    assert "aten::addmm" in names(plain)
    assert not {"record_shapes", "profile_memory", "with_stack"} & set(plain)
    wanted = ["shapes", "stacks", "memory", "nonsense"]
    capture(folder, begun(folder) + 40, id="more", options=wanted)
    more = captured(folder, "more")
    assert (more["record_shapes"], more["profile_memory"], more["with_stack"]) == (1, 1, 1)
    shapes = [
        found["args"]["Input Dims"]
        for found in more["traceEvents"]
        if found.get("name") == "aten::addmm"
    ]
    assert shapes == [[[8], [4, 8], [8, 8], [], []]] * 2
    assert "[memory]" in names(more)
    assert any("<string>" in name and "inside" in name for name in names(more))


def test_the_estimate_of_events_is_corrected_by_a_capture(trained: Training) -> None:
    folder = trained.folder
    start = begun(folder) + 40
    capture(folder, start, steps=5, id="counted")
    # The estimate that the trace before gave, or autograd's counter alone.
    assert 10 <= eventually(lambda: folder.ring().metadata.get("events_per_step")) <= 1000
    held = len(captured(folder, "counted")["traceEvents"]) / 5

    def corrected() -> bool:
        return bool(abs(folder.ring().metadata["events_per_step"] - held) <= 0.1 * held)

    eventually(corrected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("with monitor.phase('eval'): pass", "an evaluation began"),
        ("monitor.switch('checkpoint'); monitor.switch('other')", "a checkpoint began"),
    ],
)
def test_an_evaluation_or_a_checkpoint_ends_a_recording(
    trained: Training, text: str, reason: str
) -> None:
    identifier = reason.split()[1]
    trained.record(identifier)
    trained.run(text)
    failed = event(trained.folder, "capture_failed", identifier)
    assert failed["detail"] == f"interrupted: {reason}"
    assert not [name for name in files(trained.folder) if name.startswith(identifier)]
    # Before the recording it ends nothing.
    capture(trained.folder, begun(trained.folder) + 60, steps=1, id=f"{identifier}-2")
    event(trained.folder, "capture_armed", f"{identifier}-2")
    trained.run(text)
    assert event(trained.folder, "capture_finished", f"{identifier}-2")


def test_a_recording_that_takes_far_too_long_ends(trained: Training) -> None:
    trained.record("long")
    trained.run("monitor.clock.captures.session.limit_s = 0.01")
    failed = event(trained.folder, "capture_failed", "long")
    assert failed["detail"] == "interrupted: the recording took longer than 0 s"


@pytest.mark.parametrize("method", ["prepare_trace", "start_trace", "stop_trace"])
def test_an_error_of_the_profiler_is_the_one_answer(trained: Training, method: str) -> None:
    folder = trained.folder
    trained.run(
        "from torch.profiler import _KinetoProfile\n"
        f"original = _KinetoProfile.{method}\n"
        "def broken(profiler):\n"
        f"    _KinetoProfile.{method} = original\n"
        "    raise RuntimeError('broken')\n"
        f"_KinetoProfile.{method} = broken\n"
    )
    identifier = method.replace("_", "-")
    capture(folder, begun(folder) + 40, id=identifier)
    assert event(folder, "capture_failed", identifier)["detail"] == "RuntimeError: broken"
    capture(folder, begun(folder) + 40, id=f"{identifier}-2")
    assert "aten::addmm" in names(captured(folder, f"{identifier}-2"))
    ends = [found for found in events(folder, identifier) if found["event"] != "capture_started"]
    assert [found["event"] for found in ends] == ["capture_armed", "capture_failed"]
    assert not [name for name in files(folder) if name.endswith(".tmp")]


def test_there_is_an_end_to_the_captures_of_a_process(trained: Training) -> None:
    limit = "import warpwatch.captures.safety as safety; safety.MAX_CAPTURES = "
    trained.run(limit + "1")
    capture(trained.folder, start=10**6, id="one-more")
    failed = event(trained.folder, "capture_failed", "one-more")
    trained.run(limit + "50")
    assert failed["detail"] == "too_many_captures"


def test_a_thread_that_ends_while_it_records_costs_that_trace_alone(folder: Folder) -> None:
    code = training().replace("while True:", "def train(steps):\n  global number\n  while steps:")
    code = code.replace("    number += 1", "    number += 1; steps -= 1")
    code += """
import threading
for steps in (200, -1):
    thread = threading.Thread(target=train, args=(steps,))
    thread.start()
    thread.join()
"""
    with program(folder, code):
        running(folder)
        capture(folder, 190, steps=100)
        assert event(folder, "capture_failed")["detail"] == "the training thread ended"
        capture(folder, begun(folder) + 30, id="after")
        assert "aten::addmm" in names(captured(folder, "after"))


def test_a_process_group_is_described_by_torch_itself(trained: Training) -> None:
    trained.run(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    capture(trained.folder, begun(trained.folder) + 40, id="group")
    reported = captured(trained.folder, "group")["distributedInfo"]
    trained.run("dist.destroy_process_group()")
    assert (reported["backend"], reported["rank"], reported["world_size"]) == ("gloo", 0, 1)


def test_a_rank_without_a_process_group_is_reported_apart(folder: Folder) -> None:
    with program(folder, training(), RANK="3", WORLD_SIZE="8"):
        running(folder)
        capture(folder, begun(folder) + 40)
        path = handed_over(folder)
    trace = read_trace(path)
    assert (trace.rank, trace.world_size, trace.job) == (3, 8, "demo")


def test_a_program_that_is_asked_to_end_while_it_records_ends_in_order(folder: Folder) -> None:
    define = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"
    with program(folder, training(define)) as process:
        running(folder)
        start = begun(folder) + 40
        capture(folder, start, steps=100)
        eventually(lambda: begun(folder) > start + 2)
        process.terminate()
        assert process.wait(timeout=60) == 3
    assert event(folder, "capture_failed")["detail"] == "the process exits"
    assert [found for found in files(folder) if found.startswith("c-1")] == []


def test_a_child_that_is_forked_while_it_records_disturbs_nothing(trained: Training) -> None:
    folder = trained.folder
    start = begun(folder) + 40
    capture(folder, start, steps=20, id="forked")
    eventually(lambda: begun(folder) > start)
    trained.run(
        "warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for _ in range(30):\n"
        "        with monitor.step(): pass\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    assert event(folder, "capture_finished", "forked")["last_step"] == start + 19
    reported = [found["event"] for found in events(folder, "forked")]
    assert reported == ["capture_armed", "capture_started", "capture_finished"]


def test_the_longest_answer_fits(trained: Training) -> None:
    identifier = "x" * 40
    long = "".join(["j"] * 40)
    trained.run(f"monitor.clock.ring.name = '{long}-r1234567-' + 16 * 'a'")
    capture(trained.folder, begun(trained.folder) + 40, id=identifier)
    finished = event(trained.folder, "capture_finished", identifier)
    assert sorted(finished) == ["event", "first_step", "id", "last_step", "token"]


def test_a_trace_whose_ring_was_removed_is_removed(folder: Folder, tmp_path: Path) -> None:
    with program(folder, training(OBEDIENT), str(tmp_path / "asked")):
        running(folder)
        trained = Training(folder, tmp_path / "asked")
        old = folder.ring().name
        trained.record("lost")
        os.unlink(folder.path / "ranks" / f"{old}.ring")
        eventually(lambda: [ring for ring in folder.rings() if ring.header.totals.steps])
        assert folder.ring().name != old
        eventually(lambda: not files(folder))
        capture(folder, begun(folder) + 40, id="after")
        assert "aten::addmm" in names(captured(folder, "after"))


def test_an_inbox_that_goes_while_it_records_is_one_answer(folder: Folder) -> None:
    with program(folder, training()):
        running(folder)
        start = begun(folder) + 40
        capture(folder, start, steps=30)
        eventually(lambda: begun(folder) > start)
        inbox = folder.path / "inbox"
        inbox.rename(folder.path / "elsewhere")
        assert event(folder, "capture_failed")["detail"].startswith("FileNotFoundError")
        assert [found["event"] for found in events(folder, "c-1")] == [
            *("capture_armed", "capture_started", "capture_failed"),
        ]
