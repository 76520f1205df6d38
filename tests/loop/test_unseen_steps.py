"""Acceptance: a training whose steps no hook sees any more is no hang until it stands still."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.node import LoopNode, loop_node, poll

pytestmark = [pytest.mark.loops, pytest.mark.torch]

# After 40 steps it updates the model by hand, until it stands still.
TRAINING = """
import pathlib, sys, time
import torch

net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

def backward():
    net(torch.ones(4, 8)).sum().backward()
    time.sleep(0.05)

for _ in range(40):
    backward()
    optimizer.step()
while not pathlib.Path(sys.argv[1]).exists():
    backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 1e-3 * parameter.grad
time.sleep(1000)
"""
TIMEOUT_S = 3.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    hang = {"timeout_s": TIMEOUT_S, "warmup_timeout_s": 0}
    with loop_node(tmp_path, detection={"hang": hang}) as found:
        found.start_daemon()
        yield found


def test_backwards_that_go_on_without_a_step_are_no_hang(node: LoopNode, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    command = ["-m", "warpwatch", "run", "--job", "by-hand", "--"]
    command += [sys.executable, "-c", TRAINING, str(stop)]
    node.start("rank0", command, node.rank_environment(0, 1))

    def has_stepped() -> bool:
        return [rank["steps_total"] for rank in node.get("ranks")] == [40]

    poll(has_stepped, "40 steps: " + node.log("rank0"))
    node.lets_pass(3 * TIMEOUT_S)
    assert node.get("anomalies") == []
    stop.touch()
    (hang,) = poll(lambda: node.get("anomalies"), "a hang: " + node.log("daemon"))
    assert (hang["kind"], hang["job"], hang["step"]) == ("hang", "by-hand", 39)
