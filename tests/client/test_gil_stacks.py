"""The pipe that faulthandler writes into, and that it never stands in the program's way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.client.daemon_side import Folder, eventually, program

ATTACH = """
import faulthandler, os, sys, threading, time
import warpwatch

monitor = warpwatch.attach(job="held")
def step(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with monitor.step():
            time.sleep(0.005)
"""
STEPPING = ATTACH + "step(1000)\n"
ON = {"WARPWATCH_HELD_STACKS": "1"}
QUICK = {**ON, "WARPWATCH_HELD_STACKS_S": "1"}


def held(folder: Folder) -> list[Path]:
    return list((folder.path / "inbox").glob("held.*"))


def published(folder: Folder) -> Path:
    def find() -> Path | None:
        rings = folder.rings()
        name = rings[0].metadata.get("held_stacks") if rings else None
        return folder.path / "inbox" / name if name else None

    return eventually(find)


def drained(path: Path, wanted: bytes, timeout_s: float = 20) -> bytes:
    """What comes out of the pipe until ``wanted`` has."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    data = b""
    deadline = time.monotonic() + timeout_s
    while wanted not in data and time.monotonic() < deadline:
        try:
            data += os.read(fd, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(fd)
    return data


def wait_for_beat(folder: Folder, after_ns: int) -> None:
    eventually(lambda: folder.ring().header.heartbeat_ns > after_ns)


def test_the_pipe_is_the_processs_alone_full_and_gone_at_exit(folder: Folder) -> None:
    with program(folder, ATTACH + "step(0.5); sys.stdin.readline(); step(0.1)", **ON) as process:
        path = published(folder)
        found = path.stat()
        assert path.name == f"held.{folder.ring().name}.stacks.fifo"
        assert stat.S_ISFIFO(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
    assert held(folder) == []


def test_a_call_that_holds_the_gil_is_written_once_someone_reads(folder: Folder) -> None:
    code = (
        ATTACH + "import ctypes\ndef hold():\n  ctypes.PyDLL(None).sleep(1000)\nstep(0.7)\nhold()\n"
    )
    with program(folder, code, **QUICK):
        path = published(folder)
        beat = folder.ring().header.heartbeat_ns
        eventually(lambda: time.monotonic_ns() - folder.ring().header.heartbeat_ns > 2e9 and beat)
        data = drained(path, b"in <module>")
    assert b'"MainThread"' in data
    assert b'File "<string>", line 13 in hold' in data


def test_a_process_that_was_stopped_goes_on_unharmed(folder: Folder) -> None:
    busy = (
        ATTACH
        + """
def deep(n):
    return n if n < 2 else deep(n - 1) + deep(n - 2)
threading.Thread(target=lambda: [deep(14) for _ in iter(int, 1)], daemon=True).start()
while True:
    with monitor.step():
        deep(17)
"""
    )
    with program(folder, busy, **QUICK) as process:
        published(folder)
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.3)
            before = folder.ring().header.heartbeat_ns
            process.send_signal(signal.SIGCONT)
            # Two beats: the timer was armed again in between.
            wait_for_beat(folder, before + 10**9)
        assert process.poll() is None
        assert "held_stacks" in folder.ring().metadata


@pytest.mark.parametrize("stopped", [False, True])
def test_a_forked_child_ends_as_always(folder: Folder, stopped: bool) -> None:
    code = ATTACH + "step(0.7); sys.stdin.readline()\nif os.fork() == 0: sys.exit(7)\n"
    code += "print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True); step(0.1)"
    with program(folder, code, **QUICK) as process:
        published(folder)
        if stopped:
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.3)
            process.send_signal(signal.SIGCONT)
        out, _ = process.communicate("fork\n", timeout=60)
    assert (out, process.returncode) == ("7\n", 0)


@pytest.mark.parametrize(
    "use",
    [
        "faulthandler.dump_traceback_later(0.5, file=sys.stdout)",
        "original(0.5, file=sys.stdout)",
    ],
)
def test_the_programs_own_timer_wins_for_good(folder: Folder, tmp_path: Path, use: str) -> None:
    code = f"from faulthandler import dump_traceback_later as original\n{ATTACH}"
    code += f"while not os.path.exists(sys.argv[1]): step(0.1)\n{use}\nstep(3)\n"
    asked = tmp_path / "asked"
    with program(folder, code, str(asked), **QUICK) as process:
        published(folder)
        # Two beats: ours has been armed.
        wait_for_beat(folder, folder.ring().header.heartbeat_ns + 10**9)
        asked.touch()
        eventually(lambda: "held_stacks" not in folder.ring().metadata)
        eventually(lambda: not held(folder))
        out, _ = process.communicate(timeout=60)
    assert out.count("Timeout (0:00:00.500000)!") == 1
    assert process.returncode == 0


def test_a_timer_that_the_program_armed_before_is_left_alone(folder: Folder) -> None:
    code = "import faulthandler, sys\nfaulthandler.dump_traceback_later(3, file=sys.stdout)\n"
    with program(folder, code + ATTACH + "step(5)\n", **QUICK) as process:
        eventually(folder.rings)
        out, _ = process.communicate(timeout=60)
    assert "Timeout (0:00:03)!" in out
    assert "held_stacks" not in folder.ring().metadata


def test_it_is_off_unless_it_is_asked_for(folder: Folder) -> None:
    with program(folder, STEPPING, WARPWATCH_HELD_STACKS_S="1"):
        eventually(lambda: folder.rings() and len(folder.ring().steps) > 50)
        assert "held_stacks" not in folder.ring().metadata
        assert held(folder) == []


def test_a_file_that_took_the_place_of_the_pipe_is_left_alone(folder: Folder) -> None:
    swap = "import os\nos.mkfifo = lambda path, mode: open(path, 'x').close()\n"
    with program(folder, swap + STEPPING, **QUICK):
        eventually(lambda: folder.rings() and len(folder.ring().steps) > 50)
        assert "held_stacks" not in folder.ring().metadata
    assert [path.read_bytes() for path in held(folder)] == [b""]


def test_pytests_own_timer_works_in_an_observed_test(folder: Folder, tmp_path: Path) -> None:
    test = tmp_path / "test_observed.py"
    test.write_text(ATTACH + "def test_it():\n    step(2.5)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(
        [*command, "-o", "faulthandler_timeout=1.5"],
        env=folder.environment(**QUICK),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    assert "Timeout (0:00:01.500000)!" in done.stderr
