"""Stacks of a process that cannot answer: what the daemon takes from whom, and what it refuses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.client.daemon_side import Folder, eventually, program
from tests.daemon.ranks.ring_files import RingFile
from warpwatch import protocol
from warpwatch_daemon.captures.stacks import gil_stacks, outside, py_spy
from warpwatch_daemon.captures.stacks.outside import NoStacks, Silent
from warpwatch_daemon.ranks.directory import Directory
from warpwatch_daemon.ranks.process import HOLDS_GIL, STOPPED, UNKNOWN
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_daemon.ranks.table import RingTable
from warpwatch_telemetry.jobs import JobId

HEAD = json.dumps({"rank": 3, "job": "j", "main": 16, "threads": {"16": "MainThread"}}).encode()
DUMP = b"""Timeout (0:00:15)!
Thread 0x000000000000001f [worker] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 5 in wait

Thread 0x0000000000000010 (most recent call first):
  File "/home/me/tr\\xe4in.py", line 12 in hold
  File "/home/me/train.py", line ??? in <module>
  ...
"""
NAME = "held.job-r3-0123.stacks.fifo"
HOLDING = """
import ctypes, threading, time
import warpwatch

def hold():
    ctypes.PyDLL(None).sleep(1000)

monitor = warpwatch.attach(job="held")
end = time.monotonic() + 1
while time.monotonic() < end:
    with monitor.step():
        time.sleep(0.01)
hold()
"""


def silent(**changes: Any) -> Silent:
    about = {"job": "j", "rank": 3, "pid": 0, "reason": HOLDS_GIL, "held_file": NAME}
    return Silent(**{**about, "owner_uid": os.getuid(), **changes})


def without_py_spy(pid: int, timeout_s: float) -> list[dict[str, Any]]:
    raise py_spy.PySpyError("py-spy is not installed")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    os.mkfifo(path, 0o600)
    return path


def written(pipe: Path, content: bytes) -> int:
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(fd, content)
    return fd


def test_faulthandlers_text_becomes_threads_innermost_last() -> None:
    threads = gil_stacks.parse(DUMP.decode(), {16: "MainThread"}, 16)
    assert threads == [
        {
            "name": "worker",
            "ident": 31,
            "main": False,
            "frames": [{"file": "/usr/lib/python3.14/threading.py", "line": 5, "function": "wait"}],
        },
        {
            "name": "MainThread",
            "ident": 16,
            "main": True,
            "frames": [
                {"file": "/home/me/train.py", "line": 0, "function": "<module>"},
                {"file": "/home/me/tr\\xe4in.py", "line": 12, "function": "hold"},
            ],
        },
    ]


@pytest.mark.parametrize("text", ["", "Thread 0x1 (most recent call first):\n", "  File \n" * 9])
def test_what_is_no_traceback_is_no_thread(text: str) -> None:
    assert gil_stacks.parse(text, {}, None) == []


def test_the_pipe_is_read_to_the_end_of_the_dump(pipe: Path) -> None:
    fd = written(pipe, HEAD + b"\n" * 1000 + DUMP)
    began = time.monotonic()
    threads = gil_stacks.read(Directory(pipe.parent), NAME, os.getuid(), began + 60)
    assert [thread["name"] for thread in threads] == ["worker", "MainThread"]
    assert time.monotonic() - began < 30
    os.close(fd)


def test_nothing_is_waited_for_beyond_the_deadline_or_the_end_of_the_process(pipe: Path) -> None:
    fd = written(pipe, HEAD + b"\n" * 1000)
    assert gil_stacks.read(Directory(pipe.parent), NAME, os.getuid(), time.monotonic() + 0.1) == []
    os.close(fd)
    assert gil_stacks.read(Directory(pipe.parent), NAME, os.getuid(), time.monotonic() + 60) == []


def test_a_daemon_may_have_more_files_open_than_select_knows(pipe: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        stack.callback(os.close, written(pipe, HEAD + b"\n" + DUMP))
        threads = gil_stacks.read(Directory(pipe.parent), NAME, os.getuid(), time.monotonic() + 60)
    assert [thread["name"] for thread in threads] == ["worker", "MainThread"]


def test_a_pipe_that_never_ends_is_left_at_the_deadline(pipe: Path) -> None:
    code = "import os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
    code += (
        "os.write(fd, b'Timeout (')\nwhile True: os.write(fd, b'x'); import time; time.sleep(.05)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(pipe)]) as process:
        assert (
            gil_stacks.read(Directory(pipe.parent), NAME, os.getuid(), time.monotonic() + 1.5) == []
        )
        process.kill()


@pytest.mark.parametrize("head", [b"{", b"[]", b'{"threads": 5, "main": "x"}', b"\xff\xfe"])
def test_a_head_that_is_nonsense_costs_only_the_names(pipe: Path, head: bytes) -> None:
    fd = written(pipe, head + b"\n" + DUMP)
    threads = gil_stacks.read(Directory(pipe.parent), NAME, os.getuid(), time.monotonic() + 20)
    assert [(thread["name"], thread["main"]) for thread in threads] == [
        ("worker", False),
        ("", False),
    ]
    os.close(fd)


def test_only_a_named_pipe_of_the_rings_owner_is_read(tmp_path: Path, pipe: Path) -> None:
    fd = written(pipe, HEAD + b"\n" + DUMP)
    soon = time.monotonic() + 20
    assert gil_stacks.read(Directory(tmp_path), NAME, os.getuid() + 1, soon) == []
    (tmp_path / "link").symlink_to(pipe)
    assert gil_stacks.read(Directory(tmp_path), "link", os.getuid(), soon) == []
    (tmp_path / "regular").write_bytes(HEAD + b"\n" + DUMP)
    assert gil_stacks.read(Directory(tmp_path), "regular", os.getuid(), soon) == []
    os.link(pipe, tmp_path / "second")
    assert gil_stacks.read(Directory(tmp_path), NAME, os.getuid(), soon) == []
    os.close(fd)


def test_py_spys_answer_becomes_threads() -> None:
    frame = {"name": "hold", "filename": "/home/me/train.py", "line": 12, "locals": None}
    outer = {"name": "<module>", "filename": "/home/me/train.py", "line": 20}
    thread = {"thread_id": 16, "thread_name": "MainThread", "os_thread_id": 7, "owns_gil": True}
    data = json.dumps([{**thread, "frames": [frame, outer]}, 5, {"frames": "x"}]).encode()
    (found,) = py_spy.parse(data, 7)
    assert (found["name"], found["main"], found["gil"]) == ("MainThread", True, True)
    assert [frame["function"] for frame in found["frames"]] == ["<module>", "hold"]
    assert py_spy.parse(b"[[", 7) == []


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (STOPPED, "the process is stopped: no stacks (py-spy is not installed)"),
        (
            HOLDS_GIL,
            "a C call holds the GIL: no stacks (py-spy is not installed; faulthandler wrote none)",
        ),
    ],
)
def test_where_there_are_none_the_reason_is_said(tmp_path: Path, reason: str, said: str) -> None:
    with pytest.raises(NoStacks) as raised:
        outside.take(
            silent(reason=reason), Directory(tmp_path), tmp_path / "out", 0.0, without_py_spy
        )
    assert str(raised.value) == said
    assert not (tmp_path / "out").exists()


def test_py_spy_has_no_more_time_than_is_left(tmp_path: Path) -> None:
    given = []

    def read(pid: int, timeout_s: float) -> list[dict[str, Any]]:
        given.append(timeout_s)
        return [{"name": "MainThread", "frames": []}]

    for left_s in (2.0, 60.0):
        outside.take(
            silent(), Directory(tmp_path), tmp_path / "out", time.monotonic() + left_s, read
        )
    assert given[0] <= 2.0
    assert given[1] == 5.0


def test_a_process_whose_gil_is_held_is_read_by_faulthandler(tmp_path: Path) -> None:
    folder, target = Folder(tmp_path / "warpwatch"), tmp_path / "rank3.stacks.json"
    with (
        folder.held(),
        program(folder, HOLDING, WARPWATCH_HELD_STACKS="1", WARPWATCH_HELD_STACKS_S="1"),
    ):
        ring = eventually(folder.rings)[0]
        name = gil_stacks.file_name(ring.name + ".ring")
        eventually(lambda: time.monotonic_ns() - folder.ring().header.heartbeat_ns > 2e9)
        assert folder.ring().metadata["held_stacks"] == name
        rank = silent(held_file=name)
        deadline = time.monotonic() + 20
        via = outside.take(rank, Directory(folder.path / "inbox"), target, deadline, without_py_spy)
    found = json.loads(target.read_text())
    assert via == found["via"] == "faulthandler"
    assert (found["rank"], found["silent_reason"]) == (3, "holds the GIL")
    threads = {thread["name"]: thread for thread in found["threads"]}
    assert threads["MainThread"]["main"]
    assert threads["MainThread"]["frames"][-1]["function"] == "hold"
    assert "warpwatch" in threads


@pytest.mark.parametrize("reason", [STOPPED, UNKNOWN])
def test_the_pipe_of_threads_that_may_run_again_is_left_full(
    pipe: Path, tmp_path: Path, reason: str
) -> None:
    fd = written(pipe, HEAD)
    try:
        with pytest.raises(NoStacks, match="no stacks"):
            deadline = time.monotonic() + 60
            outside.take(
                silent(reason=reason),
                Directory(tmp_path),
                tmp_path / "out",
                deadline,
                without_py_spy,
            )
        assert os.read(fd, 10) == HEAD[:10]
    finally:
        os.close(fd)


def test_the_pipe_of_a_rank_that_steps_on_is_not_read(tmp_path: Path) -> None:
    file = RingFile(tmp_path, job="steps")
    (ring,) = RingTable(Directory(tmp_path), pytest.fail).scan(0.0, 0.0)
    expected = gil_stacks.file_name(ring.name)
    rank = Rank(JobId("uid/0", "steps", "1"), ring, 0.0, 0.0, set())
    rank.claims = msgspec.structs.replace(rank.claims, held_stacks=expected)
    files = []
    for begun_after_s in (0.4, 5.0):
        file.word(protocol.WORD_HEARTBEAT, 10**9)
        file.word(protocol.WORD_STEP_BEGUN_AT, 10**9 + round(begun_after_s * 1e9))
        files.append(outside.look(rank, ring.name).held_file)
    assert files == [expected, None]
    ring.reader.close()


def test_a_process_that_only_the_ring_names_is_not_looked_at(tmp_path: Path) -> None:
    file = RingFile(tmp_path, job="claims")
    with file.held() as holder:
        (ring,) = RingTable(Directory(tmp_path), pytest.fail).scan(0.0, 0.0)
        rank = Rank(JobId("uid/0", "claims", "1"), ring, 0.0, 0.0, set())
        reasons = []
        # Its own, and then that of a process which holds no lock of this ring.
        for pid in (holder.pid, os.getpid()):
            stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            identity = ring.reader.header().identity
            claim = identity._replace(pid=pid, process_start=int(stat[19]))
            file.put(0, protocol.encode_identity(claim))
            found = outside.look(rank, ring.name)
            reasons.append(found.reason)
        assert reasons == ["holds the GIL", "unknown"]
        with pytest.raises(NoStacks, match="not visible here"):
            outside.take(found, Directory(tmp_path), tmp_path / "out", 0.0, without_py_spy)
        ring.reader.close()


@pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")
def test_a_stopped_process_is_read_by_py_spy(tmp_path: Path) -> None:
    code = "import time\ndef rest():\n    print(1, flush=True)\n    time.sleep(1000)\nrest()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        try:
            rank = silent(pid=process.pid, reason=STOPPED)
            via = outside.take(rank, Directory(tmp_path), tmp_path / "out", time.monotonic() + 60)
        except NoStacks as error:
            pytest.skip(str(error))
        finally:
            process.kill()
    assert via == "py-spy"
    (thread,) = json.loads((tmp_path / "out").read_text())["threads"]
    assert [frame["function"] for frame in thread["frames"]] == ["<module>", "rest"]
