"""Stacks: the pipe that faulthandler writes into, and what the helper thread reads of threads."""

import itertools
import json
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.cases import cases
from tests.client.daemon_side import Folder, program
from tests.client.fork_server import ForkServer
from tests.client.training import Training, training
from tests.waiting import DEADLINE_S, eventually
from warpwatch import stacks

PROGRAMS = cases(__file__)
QUICK = {"WARPWATCH_HELD_STACKS": "1", "WARPWATCH_HELD_STACKS_S": "1"}
# Longer than that.
STOPPED_S = 1.3
ARMED = "from warpwatch import gil_stacks\nwait(lambda: gil_stacks._armed)"


def held(folder: Folder) -> list[Path]:
    return list((folder.path / "inbox").glob("held.*"))


def published(folder: Folder) -> Path:
    return folder.path / "inbox" / str(folder.ring().metadata["held_stacks"])


def drained(path: Path, wanted: bytes) -> bytes:
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
    os.kill(found.process.pid, signal.SIGSTOP)
    folder.silent_for(STOPPED_S)
    os.kill(found.process.pid, signal.SIGCONT)


def lives_on(folder: Folder) -> None:
    enough = folder.ring().header.heartbeat_ns + 10**9
    eventually(lambda: folder.ring().header.heartbeat_ns > enough)


def test_the_pipe_is_the_processs_alone_full_and_gone_at_exit(folder: Folder) -> None:
    with training(folder, WARPWATCH_HELD_STACKS="1") as found:
        path = published(folder)
        status = path.stat()
        assert path.name == f"held.{folder.ring().name}.stacks.fifo"
        assert stat.S_ISFIFO(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        # Once it was read, it is filled again.
        for _ in range(3):
            assert b'"threads"' in drained(path, b'"threads"')
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
    # The pipe was full before, so that what waits in it is as of this reading.
    assert data.index(b"Timeout") > 60_000


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
        assert held(folder)
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


SWAPS = "os.mkfifo = lambda path, mode: open(path, 'x').close()"


@pytest.mark.parametrize(("asked", "left"), [("0", []), ("1", [b""])])
def test_it_is_off_unless_asked_for_and_leaves_a_file_in_its_place_alone(folder, asked, left):
    with training(folder, define=SWAPS, **{**QUICK, "WARPWATCH_HELD_STACKS": asked}):
        assert "held_stacks" not in folder.ring().metadata
    assert [path.read_bytes() for path in held(folder)] == left


def test_the_innermost_frame_says_what_it_calls(folder: Folder) -> None:
    with training(folder, define=PROGRAMS["waiting"]) as found:
        stacks = found.stacks("s-1")
    innermost = {thread["name"]: thread["frames"][-1] for thread in stacks["threads"]}
    assert innermost["wait_in_with"]["calls"] == "__enter__"
    assert innermost["wait_in_call"]["calls"] == "acquire"
    assert innermost["wait_in_sleep"]["calls"] == "sleep"
    assert max(len(thread["frames"]) for thread in stacks["threads"]) == 128
    assert "warpwatch" in innermost
    assert "collectives" not in stacks


def test_of_the_collectives_the_unfinished_and_each_groups_last_are_kept(monkeypatch):
    def collectives(*dumps: str) -> Any:
        handlers = dict(zip(stacks._HANDLERS, dumps, strict=False))
        module = ModuleType("c10d")
        vars(module).update(_Request=object, _Response=object, _get_handler_names=lambda: handlers)
        vars(module)["_get_handler"] = lambda name: (
            lambda _, answer: answer.set_content(handlers[name], "application/json")
        )
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
        return stacks.collectives_in_flight()

    group: Any = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert collectives("{}") is None
    group.is_initialized = lambda: True
    case = PROGRAMS["collectives"]
    assert collectives(json.dumps(case["dump"]), "[]") == case["kept"]
    assert collectives(json.dumps(case["dump"]).ljust((8 << 20) + 1)) == []
    many = {"entries": [{"collective_seq_id": number} for number in range(300)]}
    assert [one["sequence"] for one in collectives(json.dumps(many))] == [*range(100, 300)]
    # A thread that does not come back is the only one.
    stuck = threading.Event()
    monkeypatch.setattr(stacks, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(stacks, "_ask", lambda *_: stuck.wait(DEADLINE_S))
    assert [collectives("{}"), len(stacks._given_up), collectives("{}")] == [[], 1, None]
    stuck.set()
    stacks._given_up[0].join(DEADLINE_S)
    assert collectives("{}") is not None


@pytest.mark.torch
def test_the_unfinished_collective_is_reported(folder: Folder, with_torch: ForkServer) -> None:
    store = str(folder.path / "store")
    first, second = (PROGRAMS["reducing"].format(store=store, rank=rank) for rank in range(2))
    off, loopback = {"WARPWATCH": "0"}, {"GLOO_SOCKET_IFNAME": "lo"}
    with (
        program(folder, f"{second}time.sleep(1000)", python=with_torch, **off, **loopback),
        training(folder, with_torch, first, **loopback) as found,
    ):
        found.request(1, "dist.broadcast(torch.ones(5), 1)")
        attempts = (found.stacks(f"s-{number}") for number in itertools.count())
        entries = eventually(lambda: unfinished(next(attempts)))
    assert [(entry["name"], entry["sequence"]) for entry in entries] == [("gloo:broadcast", 4)]
    assert entries[0]["input_sizes"] == [[5]]
    assert entries[0]["process_group"] == "0"


def unfinished(stacks: dict[str, Any]) -> list[dict[str, Any]]:
    """The broadcast, once it was entered: no one will ever take part in it."""
    entries = [e for e in stacks.get("collectives", []) if e["state"] != "completed"]
    return [entry for entry in entries if entry["name"] == "gloo:broadcast"]
