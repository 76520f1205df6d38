"""Stacks of a process that cannot answer: what the daemon takes from whom, and what it refuses."""

import itertools
import json
import os
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.daemon.captures.capture_node import CaptureNode
from tests.waiting import DEADLINE_S
from warpwatch import protocol
from warpwatch_daemon.participants import stacks
from warpwatch_daemon.participants.stacks import NoStacks, Silent
from warpwatch_daemon.ranks.rank import HOLDS_GIL, STOPPED, UNKNOWN, Rank
from warpwatch_runtime.directory import Directory

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
OWN = os.getuid()


def silent(**changes: Any) -> Silent:
    about = {"job": "j", "rank": 3, "pid": 0, "reason": HOLDS_GIL, "held_file": NAME}
    return Silent(**{**about, "owner_uid": os.getuid(), **changes})


def without_py_spy(pid: int, timeout_s: float) -> list[dict[str, Any]]:
    raise stacks.PySpyError(stacks.MISSING)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    os.mkfifo(path, 0o600)
    return path


@pytest.fixture
def written(pipe: Path, stack: ExitStack) -> Callable[[bytes], int]:
    """Write into the pipe, which stays open."""
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    stack.callback(os.close, fd)
    return lambda content: os.write(fd, content)


def read(folder: Path, name: str = NAME, uid: int | None = None) -> list[dict[str, Any]]:
    """With a second between two looks at the clock."""
    owner, seconds = os.getuid() if uid is None else uid, itertools.count().__next__
    return stacks.read_pipe(Directory(folder), name, owner, 60, seconds)


def take(silent: Silent, folder: Path, left_s: float = 0.0, **options: Any) -> str:
    """Into the file ``out``; the clock stands still."""
    options = {"read": without_py_spy, **options}
    target = folder / "out"
    return stacks.write_stacks(
        silent, Directory(folder), target, left_s, monotonic=lambda: 0.0, **options
    )


def test_faulthandlers_text_becomes_threads_innermost_last(golden):
    found = stacks.parse_dump(DUMP.decode(), {16: "MainThread"}, 16)
    golden("captures/threads.json", json.dumps(found, indent=1).encode())
    for text in ("", "Thread 0x1 (most recent call first):\n", "  File \n" * 9):
        assert stacks.parse_dump(text, {}, None) == []
    thread = "Thread 0x1 (most recent call first):\n" + '  File "f", line 1 in g\n' * 200
    found = stacks.parse_dump(thread * 300, {}, None)
    assert (len(found), len(found[0]["frames"])) == (256, 128)


@pytest.mark.parametrize(
    ("head", "names"),
    [
        (HEAD + b"\n" * 999, [("worker", False), ("MainThread", True)]),
        # Nonsense costs only the names.
        *((head, [("worker", False), ("", False)]) for head in (b"{", b"[]", b"\xff\xfe")),
        (b'{"threads": 5, "main": "x"}', [("worker", False), ("", False)]),
    ],
)
def test_the_pipe_is_read_to_the_end_of_the_dump(pipe, written, head, names):
    written(head + b"\n" + DUMP)
    assert [(thread["name"], thread["main"]) for thread in read(pipe.parent)] == names


def test_nothing_is_waited_for_beyond_the_deadline_or_the_end_of_the_process(pipe):
    directory, uid = Directory(pipe.parent), os.getuid()
    with pipe.open("r+b", buffering=0) as file:
        file.write(HEAD)
        assert stacks.read_pipe(directory, NAME, uid, 7, lambda: 7) == []
    assert stacks.read_pipe(directory, NAME, uid, 7 + DEADLINE_S, lambda: 7) == []


@pytest.mark.parametrize("step_s", [0.25, 0.0])
def test_a_pipe_that_never_ends_is_left_at_the_deadline_or_when_it_is_too_much(
    pipe, written, monkeypatch, step_s
):
    monkeypatch.setattr(stacks, "MAX_PIPE_BYTES", 50_000)
    times: list[float] = []

    def monotonic() -> float:
        written(b"Timeout (" + b"x" * 991)
        times.append(len(times) * step_s)
        return times[-1]

    assert stacks.read_pipe(Directory(pipe.parent), NAME, os.getuid(), 1.5, monotonic) == []
    # Half a second more is for a dump that has begun.
    assert times[-1] == (2.0 if step_s else 0.0)
    assert len(times) < 130


def test_a_daemon_may_have_more_files_open_than_select_knows(pipe, written, stack):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(1024):
        stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    written(HEAD + b"\n" + DUMP)
    assert [thread["name"] for thread in read(pipe.parent)] == ["worker", "MainThread"]


def test_only_a_named_pipe_of_the_rings_owner_is_read(tmp_path, pipe, written):
    written(HEAD + b"\n" + DUMP)
    assert read(tmp_path, uid=os.getuid() + 1) == []
    (tmp_path / "link").symlink_to(pipe)
    assert read(tmp_path, "link") == []
    (tmp_path / "regular").write_bytes(HEAD + b"\n" + DUMP)
    assert read(tmp_path, "regular") == []
    os.link(pipe, tmp_path / "second")
    assert read(tmp_path) == []
    (tmp_path / "second").unlink()
    assert len(read(tmp_path)) == 2
    # Only that one is removed after its process.
    left = []
    (tmp_path / "held.regular.stacks.fifo").touch()
    for ring, uid in (("job-r3-0123.ring", 4711), ("regular.ring", OWN), ("job-r3-0123.ring", OWN)):
        stacks.remove_pipe(Directory(tmp_path), ring, uid)
        left.append((pipe.exists(), (tmp_path / "held.regular.stacks.fifo").exists()))
    assert left == [(True, True), (True, True), (False, True)]


def test_py_spy_is_the_one_of_the_daemons_python(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert stacks.find_py_spy() is None
    (tmp_path / "py-spy").touch()
    assert stacks.find_py_spy() == str(tmp_path / "py-spy")


def test_where_there_are_none_the_reason_is_said(tmp_path):
    needed = "py-spy is not installed beside the daemon: install the extra warpwatch[pyspy]"
    for reason, said in (
        (STOPPED, f"the process is stopped: no stacks ({needed})"),
        (HOLDS_GIL, f"a C call holds the GIL: no stacks ({needed}; faulthandler wrote none)"),
    ):
        with pytest.raises(NoStacks) as raised:
            take(silent(reason=reason), tmp_path)
        assert str(raised.value) == said
    assert not (tmp_path / "out").exists()


def test_py_spy_has_no_more_time_than_is_left(tmp_path):
    given = []

    def read(pid: int, timeout_s: float) -> list[dict[str, Any]]:
        given.append(timeout_s)
        return [{"name": "MainThread", "frames": []}]

    for left_s in (2.0, 60.0):
        take(silent(), tmp_path, left_s, read=read)
    assert given == [2.0, 5.0]


def test_a_process_whose_gil_is_held_is_read_by_faulthandler(pipe, written):
    written(HEAD + b"\n" + DUMP)
    assert take(silent(), pipe.parent, DEADLINE_S) == "faulthandler"
    found = json.loads((pipe.parent / "out").read_text())
    about = ("via", "rank", "job", "silent_reason")
    assert [found[name] for name in about] == ["faulthandler", 3, "j", "holds the GIL"]
    assert [thread["frames"][-1]["function"] for thread in found["threads"]] == ["wait", "hold"]


def test_the_pipe_of_threads_that_may_run_again_is_left_full(pipe, written):
    written(HEAD)
    for reason in (STOPPED, UNKNOWN):
        with pytest.raises(NoStacks, match="no stacks"):
            take(silent(reason=reason), pipe.parent, DEADLINE_S)
    with pipe.open("r+b", buffering=0) as file:
        assert file.read(10) == HEAD[:10]


@pytest.fixture
def rank(node: CaptureNode) -> Rank:
    return next(one for one in node.source.live() if one.rank == 0)


def test_the_pipe_of_a_rank_that_steps_on_is_not_read(node, rank):
    expected = stacks.pipe_name(rank.ring.name)
    rank.claims = msgspec.structs.replace(rank.claims, held_stacks=expected)
    files = []
    for begun_after_s in (0.4, 5.0):
        node.rings[0].word(protocol.WORD_HEARTBEAT, 10**9)
        node.rings[0].word(protocol.WORD_STEP_BEGUN_AT, 10**9 + round(begun_after_s * 1e9))
        files.append(stacks.inspect(rank, rank.ring.name).held_file)
    assert files == [expected, None]
    node.rings[0].word(protocol.WORD_STEP_BEGUN_AT, 0)
    rank.claims = msgspec.structs.replace(rank.claims, held_stacks="held.other.stacks.fifo")
    assert stacks.inspect(rank, rank.ring.name).held_file is None
    node.kill(0)
    node.poll()
    with pytest.raises(NoStacks, match="the process is gone"):
        stacks.inspect(rank, rank.ring.name)


def test_a_process_that_only_the_ring_names_is_not_looked_at(node, rank, tmp_path):
    identity, reasons = rank.ring.reader.header().identity, []
    # Its own, and then that of a process which holds no lock of this ring.
    for pid in (node.rings[0].holder.pid, os.getpid()):
        stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        claim = identity._replace(pid=pid, process_start=int(stat[19]))
        node.rings[0].put(0, protocol.encode_identity(claim))
        found = stacks.inspect(rank, rank.ring.name)
        reasons.append(found.reason)
    assert reasons == ["holds the GIL", "unknown"]
    with pytest.raises(NoStacks, match="not visible here"):
        take(found, tmp_path)
