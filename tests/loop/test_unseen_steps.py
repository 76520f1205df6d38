"""Acceptance: a training whose steps no hook sees any more is no hang until it stands still."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from warpwatch_daemon.cli import main

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


# No hook sees its optimizer, and the last resort is 640 backwards away: it accumulates, maybe.
STEPLESS = """
import pathlib, sys, time
import torch

net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(130):
    net(torch.ones(4, 8)).sum().backward()
    optimizer.step()
time.sleep(1000)
"""


def test_a_program_without_a_step_says_what_mends_it_and_refuses_captures(
    node: LoopNode, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", "warpwatch", "run", "--job", "stepless", "--", sys.executable, "-c", STEPLESS]
    own = node.rank_environment(0, 1)
    node.start("rank0", command, own | {"WARPWATCH_HOOKS": "backward"})
    poll(
        lambda: [r for r in node.get("ranks") if r["calls_without_step"] >= 130],
        "calls without a step: " + node.log("rank0"),
    )
    assert main(["status", "--url", node.url]) == 0
    shown = capsys.readouterr().out
    assert "no end of a step seen in 130 backwards" in shown
    assert "put `with warpwatch.attach().step():` around a step" in shown
    answer = node.http.post("/api/v1/captures", json={"job": "stepless", "kind": "torch"})
    assert answer.status_code == 409, answer.text
    assert "no end of a step seen in 130" in answer.text
