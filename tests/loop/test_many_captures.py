"""Captures of four gloo ranks while one of them is stopped or dies: real processes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from warpwatch_telemetry.anomalies import JOB_KINDS

pytestmark = [pytest.mark.loops, pytest.mark.torch]

RANKS = 4
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


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    # A capture of an anomaly, or of a baseline, would keep the test's own from starting.
    triggers = {"cooldown_s": 0, "arm_timeout_s": 20, "baseline": {"enabled": False}}
    detectors = {"disabled": list(JOB_KINDS), "hang": {"stopped_after_s": 2}}
    with loop_node(tmp_path, triggers=triggers, detection=detectors) as node:
        node.start_daemon()
        yield node


def ask(node: LoopNode) -> str:
    answer = node.http.post("/api/v1/captures", json={"job": "many", "steps": 3})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def finished(node: LoopNode, identifier: str) -> Any:
    def look() -> Any:
        found = node.http.get(f"/api/v1/captures/{identifier}").json()
        return found if found["outcome"] else None

    return poll(look, f"capture {identifier} has an outcome: {node.log('daemon')}")


def test_a_rank_that_is_stopped_while_armed_is_named_and_goes_on(node):
    meet = str(node.folder / "meet")
    ranks = [node.start_rank(rank, PROGRAM, meet, world_size=RANKS) for rank in range(RANKS)]
    node.have_trained("many", RANKS, 20)
    identifier = ask(node)
    ranks[2].send_signal(signal.SIGSTOP)
    found = finished(node, identifier)
    assert found["outcome"] == "partial", found
    states = [rank["state"] for rank in found["ranks"]]
    assert states == ["written", "written", "missing", "written"]
    assert found["detail"].endswith(": the process is stopped"), found["detail"]
    stopped_at = step(node, 2)
    ranks[2].send_signal(signal.SIGCONT)
    poll(lambda: step(node, 2) > stopped_at + 20, "it goes on")
    # It is behind the others now; what they record does not wait for it, dead or alive. If it dies
    # before it records, they bring the same steps, and it is named.
    after = ask(node)
    ranks[2].kill()
    found = finished(node, after)
    others = [rank for rank in found["ranks"] if rank["rank"] != 2]
    assert found["outcome"] == "partial", found
    assert {(rank["state"], rank["verified"]) for rank in others} == {("written", True)}, found
    assert len({(rank["first_step"], rank["last_step"]) for rank in others}) == 1
    assert found["detail"].startswith("rank 2: the process died "), found["detail"]
    # The command that it had before it went on was taken back: it records nothing for no one.
    left = [path.name for path in (node.folder / "inbox").iterdir() if identifier in path.name]
    assert left == []


def step(node: LoopNode, rank: int) -> int:
    (found,) = (found for found in node.get("ranks") if found["rank"] == rank)
    return int(found["step"])
