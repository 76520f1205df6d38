"""What the helper thread reads of all threads, and of torch's Flight Recorder."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.client.daemon_side import Folder, program
from tests.client.fork_server import ForkServer
from tests.waiting import eventually

STEPPING = """
import threading, time
import warpwatch

monitor = warpwatch.attach(job="stacks")
"""

WAITING = (
    STEPPING
    + """
lock = threading.Lock()
lock.acquire()

def wait_in_with():
    with lock:
        pass

def wait_in_call():
    lock.acquire(timeout=1000)

def wait_in_sleep():
    time.sleep(1000)

for wait in (wait_in_with, wait_in_call, wait_in_sleep):
    threading.Thread(target=wait, name=wait.__name__, daemon=True).start()
while True:
    with monitor.step():
        time.sleep(0.01)
"""
)

REDUCING = (
    STEPPING
    + """
import os, sys
import torch, torch.distributed as dist

store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
for number in range(3):
    with monitor.step():
        dist.all_reduce(torch.ones(2, 3))
if sys.argv[2] == "0":
    dist.broadcast(torch.ones(5), 1)
time.sleep(1000)
"""
)


attempts = itertools.count(1)


def captured(folder: Folder) -> dict[str, Any]:
    ring = eventually(folder.rings)[0]
    identifier = f"1-{next(attempts)}"
    folder.command(ring.name, op="capture", id=identifier, kind="stacks", steps=1, arm_timeout_s=5)
    pattern = f"{identifier}.{ring.name}.*.stacks.json"
    (path,) = eventually(lambda: list((folder.path / "inbox").glob(pattern)))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_innermost_frame_says_what_it_calls(folder: Folder) -> None:
    with program(folder, WAITING):
        stacks = captured(folder)
    innermost = {thread["name"]: thread["frames"][-1] for thread in stacks["threads"]}
    assert innermost["wait_in_with"]["calls"] == "__enter__"
    assert innermost["wait_in_call"]["calls"] == "acquire"
    assert innermost["wait_in_sleep"]["calls"] == "sleep"
    assert "warpwatch" in innermost
    assert "collectives" not in stacks


@pytest.mark.torch
def test_the_unfinished_collective_is_reported(folder: Folder, with_torch: ForkServer) -> None:
    store = str(folder.path / "store")
    environ = {"GLOO_SOCKET_IFNAME": "lo", "RANK": "0"}
    with (
        program(folder, REDUCING, store, "0", python=with_torch, **environ),
        program(folder, REDUCING, store, "1", python=with_torch, **environ, WARPWATCH="0"),
    ):
        entries = eventually(lambda: unfinished(captured(folder)))
    assert [(entry["name"], entry["sequence"]) for entry in entries] == [("gloo:broadcast", 4)]
    assert entries[0]["input_sizes"] == [[5]]
    assert entries[0]["process_group"] == "0"


def unfinished(stacks: dict[str, Any]) -> list[dict[str, Any]]:
    """The broadcast, once it was entered: no one will ever take part in it."""
    entries = [e for e in stacks.get("collectives", []) if e["state"] != "completed"]
    return [entry for entry in entries if entry["name"] == "gloo:broadcast"]
