"""Acceptance: a training that is ended on purpose has no fault, however it is ended."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.trainings import SETTLE_S

pytestmark = [pytest.mark.loops, pytest.mark.torch]

# ``in a thread``: as Ray Train does it, whose workers then live until they are killed.
TRAINING = """
import os, sys, threading, time
import torch

rank, restarts = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
how = sys.argv[1]

def train(steps):
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(steps):
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.05)

def cleans_up():
    try:
        train(10000)
    finally:
        raise RuntimeError("there is no process group")

def fails_once():
    if restarts == 0:
        train(40 if rank == 1 else 10000)
        raise ValueError("a label is out of range")
    train(100)

def in_a_thread():
    thread = threading.Thread(target=train, args=(40,))
    thread.start()
    thread.join()
    time.sleep(1000)

def fails_in_a_thread():
    def fail():
        train(40)
        raise ValueError("a label is out of range")

    threading.Thread(target=fail).start()
    time.sleep(1000)

def one_by_one(module, name):
    train(40 + 200 * rank)
    getattr(module, name)(0)

torch.set_num_threads(1)
{
    "is done": lambda: train(40),
    "trains": lambda: train(10000),
    "cleans up": cleans_up,
    "exits": lambda: one_by_one(sys, "exit"),
    "leaves": lambda: one_by_one(os, "_exit"),
    "fails once": fails_once,
    "in a thread": in_a_thread,
    "fails in a thread": fails_in_a_thread,
}[how]()
"""
TIMEOUT_S = 6.0


class Ends:
    def __init__(self, node: LoopNode) -> None:
        self.node = node

    def start(self, job: str, how: str, ranks: int = 1) -> list[subprocess.Popen[bytes]]:
        program = ["-c", TRAINING, how]
        return [self.node.launch(job, program, rank, ranks) for rank in range(ranks)]

    def start_torchrun(self, job: str, how: str, *options: str) -> subprocess.Popen[bytes]:
        script = self.node.folder / f"{job}.py"
        script.write_text(TRAINING)
        command = ["-m", "warpwatch", "run", "--job", job, "--", sys.executable, "-m"]
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
        return self.node.start(job, [*command, str(script), how], self.node.environment)

    def start_prompt(self, job: str, *options: str) -> None:
        """A shell that runs the training first."""
        script = self.node.folder / f"{job}.py"
        script.write_text(TRAINING.replace("sys.argv[1]", '"is done"'))
        self.node.launch(job, [*options, str(script)], stdin=subprocess.PIPE)

    def statuses(self, job: str) -> list[str]:
        return [rank["status"] for rank in self.node.get("ranks") if rank["job"] == job]

    def has_stepped(self, job: str, ranks: int = 1) -> None:
        self.node.have_trained(job, ranks, 40)

    def have_ended(self, *jobs: str) -> None:
        """And who died of what has been judged."""
        for job in jobs:
            poll(lambda: "running" not in self.statuses(job), f"the end of {job}")  # noqa: B023
        self.node.lets_pass(SETTLE_S)

    def said(self, *jobs: str) -> dict[str, list[tuple[str, str, str]]]:
        """Kind, severity and summary of what was found, by job."""
        found: dict[str, list[Any]] = {job: [] for job in jobs}
        for a in self.node.get("anomalies"):
            found[a["job"]].append((a["kind"], a["severity"], a["summary"].partition(" after ")[0]))
        return found


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    hang = {"timeout_s": TIMEOUT_S, "warmup_timeout_s": 0}
    sources = {"nvml": {"enabled": False}}
    with loop_node(tmp_path, sources=sources, detection={"hang": hang}) as node:
        node.start_daemon()
        yield Ends(node)


def test_an_end_on_purpose_is_information_and_captures_nothing(ends: Ends) -> None:
    signals = {"trains": signal.SIGTERM, "cleans up": signal.SIGINT}
    processes = {how: ends.start(how, how) for how in signals}
    workers = ends.start("in a thread", "in a thread", ranks=2)
    ends.start_prompt("prompt", "-i")
    for how, number in signals.items():
        ends.has_stepped(how)
        processes[how][0].send_signal(number)
    ends.have_ended(*signals)
    ends.has_stepped("prompt")
    ends.has_stepped("in a thread", 2)
    # So long may it take until the ring says that the thread has ended.
    ends.node.lets_pass(2)
    # The other one lives on, for longer than deaths are judged together.
    workers[0].kill()
    ends.node.lets_pass(2 * TIMEOUT_S)
    assert ends.said(*signals, "in a thread", "prompt") == {
        "prompt": [], "trains": [("crash", "info", "rank 0 was gone without an exit record")],
        "cleans up": [("crash", "info", "rank 0 raised KeyboardInterrupt")], "in a thread": [],
    }  # fmt: skip
    assert sorted(ends.statuses("in a thread")) == ["exited", "running"]
    assert ends.node.get("captures") == []


def test_a_cell_that_is_done_is_no_hang(ends: Ends) -> None:
    pytest.importorskip("IPython")
    ends.start_prompt("cell", "-m", "IPython", "--simple-prompt", "-i")
    ends.has_stepped("cell")
    ends.node.lets_pass(2 * TIMEOUT_S)
    assert ends.said("cell") == {"cell": []}
    assert ends.statuses("cell") == ["running"]


def test_ranks_that_exit_long_after_each_other_are_no_crash(ends: Ends) -> None:
    ends.start("exits", "exits", ranks=2)
    ends.start("leaves", "leaves", ranks=2)
    ends.start("fails", "fails in a thread")
    for job, ranks in (("exits", 2), ("leaves", 2), ("fails", 1)):
        ends.has_stepped(job, ranks)
    ends.have_ended("exits", "leaves")
    failed = "rank 0 raised ValueError: a label is out of range"
    assert ends.said("exits", "leaves", "fails") == {
        "exits": [], "leaves": [], "fails": [("crash", "warning", failed)],
    }  # fmt: skip


def test_of_a_launchers_restart_only_the_rank_that_failed_is_a_crash(ends: Ends) -> None:
    stopped = ends.start_torchrun("stopped", "trains")
    restarted = ends.start_torchrun("restarted", "fails once", "--max-restarts", "1")
    ends.has_stepped("stopped", 2)
    stopped.terminate()
    restarted.wait(120)
    ends.have_ended("stopped", "restarted")
    failed = "rank 1 raised ValueError: a label is out of range; 1 more followed"
    assert ends.said("stopped", "restarted") == {
        "stopped": [("crash", "info", "all 2 observed ranks were gone without an exit record")],
        "restarted": [("crash", "warning", failed)],
    }
    assert ends.node.get("captures") == []
