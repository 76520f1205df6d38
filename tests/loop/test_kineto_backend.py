"""Stock PyTorch, started with ``run --backend kineto``, is captured without any shim."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll

# Nothing of ours is imported.
STOCK = """
import time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("training", flush=True)
while True:
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""
PROFILED = STOCK.replace("print(", "torch.profiler.profile().start()\nprint(")


@pytest.fixture
def node() -> Iterator[LoopNode]:
    # Paths of sockets are short, and those of pytest's own folders are not.
    with (
        tempfile.TemporaryDirectory(prefix="ww") as folder,
        loop_node(Path(folder), rendezvous={"kineto": True}) as node,
    ):
        yield node


def start(
    node: LoopNode, rank: int, *, world_size: int = 1, code: str = STOCK
) -> subprocess.Popen[bytes]:
    arguments = ["-m", "warpwatch", "run", "--backend", "kineto", "--job", "stock", "--"]
    environment = {
        "WARPWATCH_DIR": str(node.run_dir),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    return node.start(f"stock{rank}", [*arguments, sys.executable, "-c", code], environment)


def request(node: LoopNode, ranks: tuple[int, ...] = (0,), **body: Any) -> Any:
    """The answer, once all these ranks train and have polled."""
    for rank in ranks:
        # A process polls while it still imports torch.
        poll(lambda: "training" in node.log(f"stock{rank}"), 90, "it trains")  # noqa: B023

    def ask() -> Any:
        answer = node.http.post("/api/v1/captures", json={"job": "stock", "ranks": ranks, **body})
        return answer if answer.status_code == 202 else None

    return poll(ask, 60, "the ranks poll: " + node.log("daemon")).json()


def ended(node: LoopNode, capture_id: str) -> Any:
    def find() -> Any:
        answer = node.http.get(f"/api/v1/captures/{capture_id}").json()
        return answer if answer["outcome"] is not None else None

    return poll(find, 90, "the capture ends: " + node.log("daemon"))


def trace(node: LoopNode, capture: Any, rank: int) -> Any:
    (name,) = [r["file"] for r in capture["ranks"] if r["rank"] == rank]
    answer = node.http.get(f"/api/v1/captures/{capture['id']}/{name}")
    return json.loads(gzip.decompress(answer.content))


def window(content: Any) -> tuple[float, float]:
    """Begin and end of the operators' times, in seconds since the epoch."""
    base_s = content["baseTimeNanoseconds"] / 1e9
    operators = [event for event in content["traceEvents"] if event.get("cat") == "cpu_op"]
    begin = min(event["ts"] for event in operators)
    end = max(event["ts"] + event["dur"] for event in operators)
    return base_s + begin / 1e6, base_s + end / 1e6


def common_window(node: LoopNode) -> tuple[Any, float]:
    """A capture of ranks 0 and 1, and how many seconds of it they share.

    A process that a busy machine keeps from looking in time is asked again and begins later: such
    a capture is not the one that tells.
    """
    for _ in range(5):
        capture = ended(node, request(node, ranks=(0, 1))["id"])
        windows = [window(trace(node, capture, rank)) for rank in (0, 1)]
        common_s = min(end for _, end in windows) - max(begin for begin, _ in windows)
        if common_s > 0:
            break
    return capture, common_s


@pytest.mark.slow
@pytest.mark.torch
def test_an_unmodified_process_brings_a_verified_trace(node: LoopNode) -> None:
    node.start_daemon()
    start(node, 0)
    asked = request(node, options=["shapes"])
    wrong = node.http.post("/api/v1/captures", json={"job": "stok"})
    assert wrong.status_code == 404
    assert "running jobs: stock" in wrong.text
    capture = ended(node, asked["id"])
    print(f"a window of 1 s, from request to verdict: {time.time() - capture['time']:.2f} s")
    assert capture["outcome"] == "complete", capture
    assert capture["backend"] == "kineto"
    (rank,) = capture["ranks"]
    assert (rank["state"], rank["verified"], rank["problems"]) == ("written", True, [])
    content = trace(node, capture, 0)
    begin, end = window(content)
    assert 0.1 < end - begin < 1.9
    assert any("Input Dims" in event.get("args", {}) for event in content["traceEvents"])
    assert capture["diagnosis"]["traces"][0]["rank"] == 0
    (job,) = node.http.get("/api/v1/jobs").json()["jobs"]
    assert (job["name"], job["ranks"], job["backend"]) == ("stock", ["0"], "kineto")
    # Nothing stays behind where the trace was written.
    assert list((node.folder / "inbox").glob("*.*")) == []


@pytest.mark.slow
@pytest.mark.torch
def test_two_ranks_record_the_same_window_and_one_that_dies_costs_only_its_own(
    node: LoopNode,
) -> None:
    node.start_daemon()
    processes = [start(node, rank, world_size=2) for rank in (0, 1)]
    capture, common_s = common_window(node)
    assert (capture["outcome"], capture["world_size"]) == ("complete", 2)
    assert common_s > 0.3
    asked = request(node, ranks=(0, 1))
    processes[1].kill()
    capture = ended(node, asked["id"])
    assert capture["outcome"] == "partial"
    states = {rank["rank"]: (rank["state"], rank["detail"]) for rank in capture["ranks"]}
    assert states == {0: ("written", ""), 1: ("missing", "the process ended")}


@pytest.mark.slow
@pytest.mark.torch
def test_a_process_with_another_profiler_is_left_alone(node: LoopNode) -> None:
    node.start_daemon()
    start(node, 0, code=PROFILED)
    capture = ended(node, request(node)["id"])
    assert capture["outcome"] == "failed"
    (rank,) = capture["ranks"]
    assert rank["state"] == "failed"
    assert "another profiler has been running" in rank["detail"]


def test_without_a_daemon_nothing_is_set(node: LoopNode) -> None:
    code = "import os; print(sorted(name for name in os.environ if 'KINETO' in name))"
    assert start(node, 0, code=code).wait(30) == 0
    said = node.log("stock0").splitlines()
    assert said == [
        "python -m warpwatch run: no daemon is running here; the command runs unobserved",
        str([name for name in sorted(os.environ) if "KINETO" in name]),
    ]
