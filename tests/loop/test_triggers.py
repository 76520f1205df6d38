"""What the trigger policy captures by itself, with real training processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.trainings import ON_A_BUSY_MACHINE
from warpwatch_daemon.config.triggers import TriggersConfig

pytestmark = [pytest.mark.loops, pytest.mark.torch]

# argv: where the ranks meet, and a file: while it is there, the last rank works 60 ms longer.
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
import warpwatch

torch.set_num_threads(1)
place, slow = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = warpwatch.attach(job="triggers")
while True:
    with monitor.step(samples=8):
        with monitor.phase("forward"):
            time.sleep(0.02)
            if rank == size - 1 and os.path.exists(slow):
                time.sleep(0.06)
            loss = model(torch.randn(8, 64)).square().mean()
        with monitor.phase("backward"):
            optimizer.zero_grad()
            loss.backward()
        with monitor.phase("comm"):
            dist.all_reduce(loss.detach().clone())
        optimizer.step()
"""


class Training:
    """The ranks of one job, and the switch that slows the last of them."""

    def __init__(self, node: LoopNode, ranks: int) -> None:
        self._node = node
        self.slow = node.folder / "slow"
        meeting = str(node.folder / "meeting")
        for rank in range(ranks):
            node.start_rank(rank, PROGRAM, meeting, str(self.slow), world_size=ranks)

    def has_trained(self, ranks: int, steps: int) -> None:
        def all_have() -> bool:
            found = self._node.get("ranks")
            return len(found) == ranks and all(rank["steps_total"] >= steps for rank in found)

        poll(all_have, "the ranks train: " + self._node.log("rank0"))


def ended(node: LoopNode, trigger: str, count: int = 1) -> Any:
    """The captures of this trigger once there are so many and all have ended."""

    def find() -> Any:
        found = [c for c in node.get("captures") if c["request"]["trigger"] == trigger]
        return len(found) >= count and all(c["outcome"] for c in found) and found

    return poll(find, f"a capture, {trigger}: " + node.log("daemon"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    others = {kind: None for kind in TriggersConfig().recipes if kind != "straggler"}
    triggers = {
        "cooldown_s": 0,
        "baseline": {"after_steps": 30, "after_s": 1},
        # What a busy machine does to the ranks besides is not what is tested.
        "recipes": others,
    }
    with loop_node(tmp_path, triggers=triggers, detection=ON_A_BUSY_MACHINE) as found:
        found.start_daemon()
        yield found


def test_a_healthy_job_brings_one_baseline_and_later_captures_name_it(node: LoopNode) -> None:
    Training(node, 2)
    (baseline,) = ended(node, "baseline")
    assert (baseline["outcome"], baseline["baseline_id"]) == ("complete", None)
    assert [rank["rank"] for rank in baseline["ranks"]] == [0]
    assert baseline["ranks"][0]["verified"] is True
    labels = {"kind": "torch", "trigger": "baseline", "outcome": "complete"}
    assert node.metric("warpwatch_captures_total", **labels) == 1
    node.kill_daemon()
    node.start_daemon()
    poll(lambda: len(node.get("ranks")) == 2, "the ranks are back: " + node.log("daemon"))
    body = {"job": "triggers", "steps": 3}
    poll(lambda: node.http.post("/api/v1/captures", json=body).status_code == 202, "a capture")
    (later,) = ended(node, "manual")
    assert later["outcome"] == "complete"
    assert later["baseline_id"] == baseline["id"]
    assert len(ended(node, "baseline")) == 1


def test_a_slow_rank_is_captured_with_one_peer_in_the_same_steps(node: LoopNode) -> None:
    training = Training(node, 3)
    # Beyond warm-up, with a baseline of what each rank usually takes.
    training.has_trained(3, 500)
    training.slow.touch()
    straggler = ended(node, "anomaly")[0]
    assert straggler["outcome"] == "complete", straggler
    assert [rank["rank"] for rank in straggler["ranks"]] == [1, 2]
    steps = {(rank["first_step"], rank["last_step"]) for rank in straggler["ranks"]}
    assert len(steps) == 1
    asked = straggler["request"]["anomaly_id"]
    (anomaly,) = [a for a in node.get("anomalies") if a["id"] == asked]
    assert (anomaly["kind"], anomaly["rank"]) == ("straggler", 2)
    decision = anomaly["decision"]
    assert (decision["outcome"], decision["capture_id"]) == ("captured", straggler["id"])
