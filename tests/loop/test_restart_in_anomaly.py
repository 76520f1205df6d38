"""A restart of the daemon in the middle of an anomaly: it stays one anomaly."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.preloaded import ShiftedClock
from tests.loop.programs import STEPPING

# Waits for input in every step while the file of its argument exists.
STALLING = """
import os, sys, time
import warpwatch

monitor = warpwatch.attach(job="stalling")
while True:
    with monitor.step(samples=4):
        with monitor.phase("data_wait"):
            time.sleep(0.03 if os.path.exists(sys.argv[1]) else 0.0005)
        time.sleep(0.015)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    detectors = {"hang": {"stopped_after_s": 1}}
    with loop_node(tmp_path, detection=detectors) as node:
        yield node


def over(node: LoopNode, kind: str) -> list[Any]:
    return [anomaly for anomaly in node.anomalies(kind) if anomaly["end_time"] is not None]


def begin(anomaly: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(anomaly[name] for name in ("id", "time", "rank", "begin_step"))


def captured(node: LoopNode, anomaly: dict[str, Any]) -> list[Any]:
    captures = node.captures(anomaly_id=anomaly["id"])
    return captures if all(capture["outcome"] is not None for capture in captures) else []


def test_a_hang_goes_on_over_a_killed_daemon_and_ends_once(node):
    node.start_daemon()
    rank = node.start_rank(0, STEPPING, "0.02", world_size=1)
    node.have_trained("stepping", 1, 100)
    rank.send_signal(signal.SIGSTOP)
    (found,) = poll(lambda: node.anomalies("hang"), "the hang is found")
    state = node.folder / "captures" / "detectors.state"
    # It was saved with the anomaly in it: at the latest two seconds after it opened.
    poll(lambda: state.exists() and state.stat().st_mtime > found["time"] + 0.1, "it is saved")
    node.kill_daemon()
    node.start_daemon()
    (known,) = poll(lambda: node.anomalies("hang"), "the hang is known")
    assert begin(known) == begin(found)
    assert known["end_time"] is None
    assert node.metric("warpwatch_anomalies_total", kind="hang") is None
    rank.send_signal(signal.SIGCONT)
    (ended,) = poll(lambda: over(node, "hang"), "the hang is over")
    assert begin(ended) == begin(found)
    node.terminate_daemon()
    node.start_daemon()
    assert node.anomalies("hang") == [ended]


@pytest.mark.loops
def test_a_stall_goes_on_over_a_stopped_daemon_with_its_minutes(node):
    switch = node.folder / "stall"
    node.start_daemon()
    node.start_rank(0, STALLING, str(switch), world_size=1)
    node.have_trained("stalling", 1, 300)
    switch.touch()
    (found,) = poll(lambda: node.anomalies("data_stall"), "the stall is found")
    captures = poll(lambda: captured(node, found), "its capture has ended")
    node.terminate_daemon()
    node.start_daemon()
    (known,) = node.anomalies("data_stall")
    assert begin(known) == begin(found)
    assert known["end_time"] is None
    assert known["worst"]["value"] >= found["value"]
    switch.unlink()

    def recovering() -> Any:
        (stall,) = node.anomalies("data_stall")
        return stall if stall["summary"].startswith("recovering: now ") else None

    said = poll(recovering, "it recovers")
    # It may have become worse until then.
    assert said["worst"]["value"] >= known["worst"]["value"]
    assert said["worst"]["summary"] in said["summary"]
    (ended,) = poll(lambda: over(node, "data_stall"), "the stall is over")
    assert begin(ended) == begin(found)
    assert ended["worst"]["value"] >= known["worst"]["value"] > 0.3
    # Not the nothing that it was in the end.
    for said in (ended, node.http.get(f"/api/v1/anomalies/{ended['id']}").json()):
        assert all(said[name] == ended["worst"][name] for name in ("value", "summary"))
    one = node.http.get(f"/api/v1/anomalies/{ended['id']}").json()
    (job,) = [s for s in one["context"]["series"] if s["job"] and s["rank"] is None]
    # The series of both daemons are joined.
    assert job["times"][0] <= found["time"]
    assert job["times"][-1] >= ended["end_time"] - 40
    assert len(job["values"]["phase_s{phase=data_wait}"]) == len(job["times"])
    # The program has no torch. This is not an interruption, so nothing is captured twice.
    assert [capture["detail"] for capture in captures] == ["rank 0: no_torch"]
    assert captured(node, ended) == captures


def test_steps_from_before_a_restart_stay_in_order_when_the_clock_was_set_back(tmp_path):
    log = tmp_path / "telemetry.jsonl"
    clock = ShiftedClock(tmp_path)
    with loop_node(tmp_path, exporters={"jsonl": {"path": str(log)}}) as node:
        node.start_daemon(**clock.environment)
        for rank in (0, 1):
            node.start_rank(rank, STEPPING, "0.02", **clock.environment)
        node.have_trained("stepping", 2, 150)
        node.terminate_daemon()
        log.unlink()
        clock.set(-3600)
        node.start_daemon(**clock.environment)
        poll(log.exists, "a log is written")
        poll(lambda: log.read_text().count('"type":"step"') > 200, "steps are read again")
        records = [json.loads(line) for line in log.read_text().splitlines()[:-1]]
    steps = [(one["step"], one["rank"]) for one in records if one["type"] == "step"]
    # Undated records come step by step, not rank by rank.
    assert steps[:100] == sorted(steps[:100], key=lambda step: step[0])
    assert {rank for _, rank in steps[:100]} == {0, 1}
