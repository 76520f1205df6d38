"""Captures of four gloo ranks while one of them is stopped or dies: real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll

pytestmark = [pytest.mark.loops, pytest.mark.torch]

RANKS = range(4)
# argv: the file at which the ranks meet before their first step.
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
import warpwatch

torch.set_num_threads(1)
(place,) = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
dist.barrier()
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = warpwatch.attach(job="many")
while True:
    with monitor.step(samples=8):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.008)
"""


class Ranks:
    """Four training processes of one node; a context manager that ends them."""

    def __init__(self, node: LoopNode) -> None:
        self.node = node
        place = node.folder / "meet"
        place.unlink(missing_ok=True)
        self.processes = [
            node.start_rank(rank, PROGRAM, str(place), world_size=len(RANKS)) for rank in RANKS
        ]
        poll(self.are_stepping, f"four ranks step: {node.log('rank0')}")

    def are_stepping(self) -> bool:
        running = [rank for rank in self.node.get("ranks") if rank["status"] == "running"]
        return len(running) == len(RANKS) and all((rank["step"] or 0) > 20 for rank in running)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in RANKS:
            self.kill(rank)
        poll(lambda: not self.are_stepping(), "their death is seen")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    triggers = {"cooldown_s": 0, "arm_timeout_s": 20}
    detectors = {"disabled": ["hang"], "hang": {"stopped_after_s": 2}}
    with loop_node(tmp_path, triggers=triggers, detection=detectors) as node:
        node.start_daemon()
        yield node


def ask(node: LoopNode, steps: int) -> str:
    answer = node.http.post("/api/v1/captures", json={"job": "many", "steps": steps})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def capture(node: LoopNode, identifier: str) -> Any:
    return node.http.get(f"/api/v1/captures/{identifier}").json()


def finished(node: LoopNode, identifier: str) -> Any:
    def look() -> Any:
        found = capture(node, identifier)
        return found if found["outcome"] else None

    return poll(look, f"capture {identifier} has an outcome: {node.log('daemon')}")


def window(ranks: list[Any]) -> set[tuple[int, int]]:
    return {(rank["first_step"], rank["last_step"]) for rank in ranks}


def _capture_with_a_death(node: LoopNode, ranks: Ranks, victim: int) -> None:
    """Before it records: all others bring the same steps, and this one is named."""
    identifier = ask(node, 3)
    ranks.kill(victim)
    found = finished(node, identifier)
    others = [rank for rank in found["ranks"] if rank["rank"] != victim]
    assert found["outcome"] == "partial", found
    assert {rank["state"] for rank in others} == {"written"}, found
    assert all(rank["verified"] for rank in others), found["detail"]
    assert len(window(others)) == 1
    assert found["detail"].startswith(f"rank {victim}: the process died "), found["detail"]


def test_a_rank_that_is_stopped_while_armed_is_named_and_goes_on(node):
    with Ranks(node) as ranks:
        stopped = ranks.processes[2]
        identifier = ask(node, 3)
        stopped.send_signal(signal.SIGSTOP)
        found = finished(node, identifier)
        assert found["outcome"] == "partial", found
        states = [rank["state"] for rank in found["ranks"]]
        assert states == ["written", "written", "missing", "written"]
        assert found["detail"].endswith(": the process is stopped"), found["detail"]
        stopped_at = step(node, 2)
        stopped.send_signal(signal.SIGCONT)
        poll(lambda: step(node, 2) > stopped_at + 20, "it goes on")
        # It is behind the others now; what they record does not wait for it, dead or alive.
        _capture_with_a_death(node, ranks, victim=2)
    # The command that it had before it went on was taken back: it records nothing for no one.
    left = [path.name for path in (node.folder / "inbox").iterdir() if identifier in path.name]
    assert left == []


def step(node: LoopNode, rank: int) -> int:
    (found,) = (found for found in node.get("ranks") if found["rank"] == rank)
    return int(found["step"])
