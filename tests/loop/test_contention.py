"""A rank whose core others use: what is said of the slow rank names who, and survives a replay."""

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.trainings import ON_A_BUSY_MACHINE, Job
from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.log import Decoder

pytestmark = [pytest.mark.loops, pytest.mark.torch]

SLOW, OTHERS = 2, (0, 1, 3)
HOGS = 3


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    config: dict[str, Any] = {
        "detection": ON_A_BUSY_MACHINE,
        "exporters": {"jsonl": {"path": str(tmp_path / "telemetry.jsonl")}},
        "sources": {"nvml": {"enabled": False}},
        "triggers": {"dry_run": True},
    }
    with loop_node(tmp_path, **config) as node:
        node.start_daemon()
        yield node
        assert "ERROR" not in node.log("daemon")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no neighbour")
def test_who_uses_the_core_of_a_slow_rank_is_named(node: LoopNode) -> None:
    job = Job(node, "crowded")
    # All take equally long; one of them needs a core for it.
    job.go_wrong({"compute": (SLOW,), "slow_forward": OTHERS})
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(job.processes[SLOW].pid, {core})
    job.has_trained(200)
    before_s = node.metric("warpwatch_rank_core_wait_seconds_total", rank=str(SLOW))
    hogs = [node.start(f"hog{number}", ["-c", "while True: pass"], {}) for number in range(HOGS)]
    for hog in hogs:
        os.sched_setaffinity(hog.pid, {core})

    def named() -> Any:
        found = job.anomalies("straggler")
        return [one for one in found if " used " in one["summary"]]

    (straggler,) = poll(named, "a straggler with who used its core")
    pids = {hog.pid for hog in hogs}
    names_who(straggler, core, pids)
    after_s = node.metric("warpwatch_rank_core_wait_seconds_total", rank=str(SLOW))
    assert before_s is not None and after_s is not None and after_s - before_s > 0.5
    node.terminate_daemon()
    names_who(replayed(node), core, pids)


def names_who(straggler: Any, core: int, pids: set[int]) -> None:
    assert straggler["rank"] == SLOW
    (said,) = straggler["evidence"]
    assert said in straggler["summary"]
    match = re.fullmatch(
        rf"rank {SLOW} waited (\d+) % of the time for a core \(its peers \d+ %\), while "
        rf"python\S* \(pid ([\d, ]+)\) used \d+ % of core {core}",
        said,
    )
    assert match is not None, said
    assert int(match[1]) >= 10
    assert {int(pid) for pid in match[2].split(", ")} == pids


def replayed(node: LoopNode) -> Any:
    decoder, replay = Decoder(), LogReplay()
    with (node.folder / "telemetry.jsonl").open("rb") as log:
        for _ in replay.run(decoder.decode_line(line) for line in log):
            pass
    return next(asdict(one) for one in replay.anomalies.values() if one.kind == "straggler")
