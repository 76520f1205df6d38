"""The pipe that faulthandler writes into, and that it never stands in the program's way."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from tests.client.daemon_side import Folder
from tests.client.training import Training, training
from tests.waiting import eventually

QUICK = {"WARPWATCH_HELD_STACKS": "1", "WARPWATCH_HELD_STACKS_S": "1"}
# Longer than that.
STOPPED_S = 1.3
ARMED = "from warpwatch import gil_stacks\nwait(lambda: gil_stacks._armed)"


def held(folder: Folder) -> list[Path]:
    return list((folder.path / "inbox").glob("held.*"))


def published(folder: Folder) -> Path:
    return folder.path / "inbox" / str(folder.ring().metadata["held_stacks"])


def drained(path: Path, wanted: bytes) -> bytes:
    """What comes out of the pipe until ``wanted`` has."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    data = b""

    def read() -> bool:
        nonlocal data
        try:
            data += os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        return wanted in data

    eventually(read, lambda: data)
    os.close(fd)
    return data


def stop(folder: Folder, found: Training) -> None:
    """Stop the process for longer than the timer, and let it go on."""
    os.kill(found.process.pid, signal.SIGSTOP)
    folder.silent_for(STOPPED_S)
    os.kill(found.process.pid, signal.SIGCONT)


def lives_on(folder: Folder) -> None:
    """Wait for signs of life, for a second."""
    enough = folder.ring().header.heartbeat_ns + 10**9
    eventually(lambda: folder.ring().header.heartbeat_ns > enough)


def test_the_pipe_is_the_processs_alone_full_and_gone_at_exit(folder: Folder) -> None:
    with training(folder, WARPWATCH_HELD_STACKS="1") as found:
        path = published(folder)
        status = path.stat()
        assert path.name == f"held.{folder.ring().name}.stacks.fifo"
        assert stat.S_ISFIFO(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        found.end()
    assert held(folder) == []


def test_a_call_that_holds_the_gil_is_written_once_someone_reads(folder: Folder) -> None:
    hold = "import ctypes\ndef hold():\n  ctypes.PyDLL(None).sleep(1000)\nhold()"
    with training(folder, **QUICK) as found:
        found.steps(1, ARMED)
        found.request(1, hold)
        folder.silent_for(2 * STOPPED_S)
        data = drained(published(folder), b"in serve")
    assert b'"MainThread"' in data
    assert b'File "<string>", line 3 in hold' in data


def test_a_process_that_was_stopped_goes_on_unharmed(folder: Folder) -> None:
    busy = (
        "def work(n=17): return n if n < 2 else work(n - 1) + work(n - 2)\n"
        "threading.Thread(target=lambda: [work(14) for _ in iter(int, 1)], daemon=True).start()\n"
    )
    with training(folder, define=busy, **QUICK) as found:
        found.steps(1, ARMED)
        found.request(10**9)
        for _ in range(2):
            stop(folder, found)
            # The timer was armed again in between.
            lives_on(folder)
        assert found.process.poll() is None
        assert "held_stacks" in folder.ring().metadata


@pytest.mark.parametrize("stopped", [False, True])
def test_a_forked_child_ends_as_always(folder: Folder, stopped: bool) -> None:
    with training(folder, **QUICK) as found:
        found.steps(1, ARMED)
        if stopped:
            stop(folder, found)
        fork = "if os.fork() == 0: sys.exit(7)\n"
        found.steps(1, fork + "assert os.waitstatus_to_exitcode(os.wait()[1]) == 7")
        found.end()


@pytest.mark.parametrize("use", ["faulthandler.dump_traceback_later", "original"])
def test_the_programs_own_timer_wins_for_good(folder: Folder, tmp_path: Path, use: str) -> None:
    define = "import faulthandler\nfrom faulthandler import dump_traceback_later as original\n"
    dumped = tmp_path / "dumped"
    with training(folder, define=define, **QUICK) as found:
        found.steps(1, ARMED)
        found.steps(1, f"file = open({str(dumped)!r}, 'w')\n{use}(0.5, file=file)")
        eventually(lambda: "held_stacks" not in folder.ring().metadata)
        eventually(lambda: not held(folder))
        eventually(dumped.read_text)
        found.end()
    assert dumped.read_text().count("Timeout (0:00:00.500000)!") == 1


def test_a_timer_that_was_armed_before_is_left_alone(folder: Folder, tmp_path: Path) -> None:
    dumped = tmp_path / "dumped"
    define = f"import faulthandler\nfile = open({str(dumped)!r}, 'w')\n"
    define += "faulthandler.dump_traceback_later(0.5, repeat=True, file=file)\n"
    with training(folder, define=define, **QUICK):
        assert "held_stacks" not in folder.ring().metadata
        dumps = dumped.read_text().count("Timeout")
        eventually(lambda: dumped.read_text().count("Timeout") > dumps + 1)


def test_it_is_off_unless_it_is_asked_for(folder: Folder) -> None:
    with training(folder, WARPWATCH_HELD_STACKS_S="1"):
        assert "held_stacks" not in folder.ring().metadata
        assert held(folder) == []


def test_a_file_that_took_the_place_of_the_pipe_is_left_alone(folder: Folder) -> None:
    swap = "os.mkfifo = lambda path, mode: open(path, 'x').close()"
    with training(folder, define=swap, **QUICK):
        assert "held_stacks" not in folder.ring().metadata
    assert [path.read_bytes() for path in held(folder)] == [b""]
