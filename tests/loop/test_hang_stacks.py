"""Acceptance: a hang is answered with the stacks of all threads and who waits for whom."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from warpwatch_daemon.demo.processes import free_port
from warpwatch_daemon.participants.stacks import find_py_spy

# Hangs at its 30th step until it is killed; a second thread sits in a place of its own.
HANGING = """
import ctypes, sys, threading, time
import warpwatch

def rest():
    time.sleep(1000)

def wait_for_lock():
    lock.acquire()

def hold():
    ctypes.PyDLL(None).sleep(1000)

lock = threading.Lock()
lock.acquire()
threading.Thread(target=rest, name="resting", daemon=True).start()
monitor = warpwatch.attach(job="hanging")
for number in range(30):
    with monitor.step():
        time.sleep(0.05)
with monitor.step():
    {"lock": wait_for_lock, "gil": hold}[sys.argv[1]]()
"""

REDUCING = """
import os, sys, threading, time
import torch, torch.distributed as dist
import warpwatch

def rest():
    time.sleep(1000)

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
threading.Thread(target=rest, name="resting", daemon=True).start()
dist.init_process_group("gloo")
monitor = warpwatch.attach(job="hanging")
while True:
    with monitor.step():
        dist.all_reduce(torch.ones(4))
        time.sleep(0.05)
"""

DAEMON = """
import sys
from warpwatch_daemon.cli import main

sys.exit(main(["daemon", "--config", sys.argv[1]]))
"""
# As where it is not installed: then nothing reads the stacks of a process that is stopped.
WITHOUT_PY_SPY = f"""
from warpwatch_daemon.participants import stacks

stacks.find_py_spy = lambda: None
{DAEMON}
"""
HANG = {"timeout_s": 8, "warmup_timeout_s": 0, "stopped_after_s": 3}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    with loop_node(tmp_path, detection={"hang": HANG}) as found:
        found.start_daemon()
        yield found


def answer(node: LoopNode) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The capture that followed the hang, and the stacks of each rank that brought some."""

    known = "a capture: " + node.log("daemon")
    capture: dict[str, Any] = poll(lambda: node.ended(anomaly_kind="hang"), known)[0]
    stacks = {}
    for rank in capture["ranks"]:
        if rank["file"]:
            content = node.http.get(f"/api/v1/captures/{capture['id']}/{rank['file']}").text
            stacks[rank["rank"]] = json.loads(content)
    return capture, stacks


def names(stacks: dict[str, Any]) -> set[str]:
    return {thread["name"] for thread in stacks["threads"]}


def test_a_lock_that_no_one_releases(node: LoopNode) -> None:
    node.start_rank(0, HANGING, "lock", world_size=1)
    capture, stacks = answer(node)
    assert capture["outcome"] == "complete"
    assert stacks[0]["via"] == "helper"
    assert {"MainThread", "resting", "warpwatch"} <= names(stacks[0])
    assert (
        capture["diagnosis"]["summary"] == "rank 0 waits for a lock in wait_for_lock (<string>:9)"
    )
    assert capture["diagnosis"]["verdict"] == "blocked_rank"


@pytest.mark.parametrize("held", ["1", "0"])
def test_a_c_call_that_holds_the_gil(node: LoopNode, held: str) -> None:
    if held == "0" and find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    opted_in = {"WARPWATCH_HELD_STACKS": held, "WARPWATCH_HELD_STACKS_S": "2"}
    process = node.start_rank(0, HANGING, "gil", world_size=1, **opted_in)
    capture, stacks = answer(node)
    assert capture["outcome"] == "complete"
    assert stacks[0]["via"] == ("faulthandler" if find_py_spy() is None else "py-spy")
    assert capture["ranks"][0]["detail"] == f"taken by {stacks[0]['via']}"
    assert {"MainThread", "resting"} <= names(stacks[0])
    said = "rank 0 is inside a C call in hold (<string>:12) that holds the GIL"
    assert capture["diagnosis"]["summary"] == said
    pipes = (node.folder / "inbox").glob
    assert len(list(pipes("held.*"))) == int(held)
    process.kill()
    poll(lambda: not list(pipes("held.*")), "the pipe of a dead process goes")


@pytest.mark.loops
@pytest.mark.torch
@pytest.mark.parametrize("daemon", [DAEMON, WITHOUT_PY_SPY], ids=["with py-spy", "without"])
def test_a_collective_whose_peer_is_stopped(tmp_path: Path, daemon: str) -> None:
    with loop_node(tmp_path, detection={"hang": HANG}) as node:
        node.start("daemon", ["-c", daemon, str(node.config)], {})
        stops_in_a_collective(node)


def stops_in_a_collective(node: LoopNode) -> None:
    port = str(free_port())
    node.start_rank(0, REDUCING, port)
    peer = node.start_rank(1, REDUCING, port)
    node.have_trained("hanging", 2, 30)
    os.kill(peer.pid, signal.SIGSTOP)
    capture, stacks = answer(node)
    assert {"MainThread", "resting"} <= names(stacks[0])
    summary = capture["diagnosis"]["summary"]
    assert summary.startswith("rank 0 waits in all_reduce for rank 1, which is stopped"), summary
    (finding,) = capture["diagnosis"]["findings"]
    assert (capture["diagnosis"]["verdict"], finding["rank"]) == ("stopped_rank", 1)
    assert stacks[0]["collectives"][-1]["name"] == "gloo:all_reduce"
    # A second capture would say no more of a stopped process.
    assert [c["id"] for c in node.get("captures")] == [capture["id"]]
    assert stacks[0]["collectives"][-1]["state"] != "completed"
