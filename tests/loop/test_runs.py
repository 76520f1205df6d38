"""Compares two runs of one program, the second with a slower part."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from warpwatch_capturing.config import TriggersConfig

pytestmark = [pytest.mark.loops, pytest.mark.torch]

# argv: how often a step sorts, and how many steps.
PROGRAM = """
import sys, time
import torch
import warpwatch

torch.set_num_threads(1)
sorts, steps = map(int, sys.argv[1:])
values = torch.rand(20_000)
monitor = warpwatch.attach(job="train")
for _ in range(steps):
    with monitor.step(tokens=100):
        with monitor.phase("forward"):
            for _ in range(sorts):
                torch.sort(values)
        with monitor.phase("backward"):
            time.sleep(0.01)
"""


def run(node: LoopNode, name: str, sorts: int, steps: int) -> None:
    node.start_rank(0, PROGRAM, str(sorts), str(steps), world_size=1, WARPWATCH_RUN=name)


def known(node: LoopNode, name: str) -> Any:
    return next((one for one in node.get("runs") if one["run"] == name), {})


def captured(node: LoopNode, trigger: str) -> Any:
    found = node.captures(trigger=trigger)
    return found[0] if found and found[0]["outcome"] else None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    others = {kind: None for kind in TriggersConfig().recipes if kind != "run_regression"}
    baseline = {"after_steps": 60, "after_s": 1}
    triggers = {"cooldown_s": 0, "baseline": baseline, "recipes": others}
    config = {"remote_store": {"url": (tmp_path / "bucket").as_uri()}, "triggers": triggers}
    with loop_node(tmp_path, **config) as node:
        node.start_daemon()
        yield node


def test_a_slower_run_is_found_and_its_phase_and_operator_are_named(node: LoopNode) -> None:
    run(node, "monday", 2, 250)
    baseline = poll(lambda: captured(node, "baseline"), node.log("daemon"))
    poll(lambda: known(node, "monday").get("end_time"), node.log("rank0"))
    # The run's summary outlives the daemon.
    node.kill_daemon()
    node.start_daemon()
    run(node, "tuesday", 6, 100_000)
    (anomaly,) = poll(lambda: node.anomalies("run_regression"), node.log("daemon"))
    assert (anomaly["job"], anomaly["run"], anomaly["rank"]) == ("train", "tuesday", None)
    assert "longer than in the run before" in anomaly["summary"]
    assert anomaly["summary"].endswith("most of it in forward")
    found = json.loads(node.command("runs", "compare", "monday", "train/tuesday", "--json"))
    assert (found["grown"], found["differs"]) == ("forward", [])
    assert found["step_ratio"] > 1.1
    lines = node.command("runs").splitlines()
    assert [line.split(":")[0] for line in lines] == ["train/monday", "train/tuesday"]
    capture = poll(lambda: captured(node, "anomaly"), node.log("daemon"))
    assert capture["baseline_id"] == baseline["id"]
    (comparison,) = capture["diagnosis"]["comparison"]
    assert comparison["operators"][0]["name"] == "aten::sort"
    assert any(text.startswith("operator aten::sort: ") for text in comparison["sentences"])
    copies = [
        p.relative_to(node.folder / "bucket")
        for p in node.folder.rglob("monday.json")
        if "bucket" in p.parts
    ]
    assert copies == [Path("runs", f"uid%2F{os.getuid()}", "train", "monday.json")]
