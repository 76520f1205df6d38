"""A fleet that is killed again and again: training goes on, and one fault stays one anomaly."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import ApiAnswers, poll
from tests.loop.over_nodes import is_judged
from tests.loop.trainings import ON_A_BUSY_MACHINE, RANKS

pytestmark = [pytest.mark.loops, pytest.mark.torch]

KILLS = 10
# An agent keeps what it knows each ten seconds.
SAVED_S = 15.0
COMPARED_STEPS = 200
_LOSS = re.compile(r"^step (\d+): ([\d.]+)$", re.MULTILINE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LoopCluster]:
    with loop_cluster(tmp_path, 2, detection=ON_A_BUSY_MACHINE) as cluster:
        cluster.start()
        yield cluster


def stragglers(of: ApiAnswers) -> list[str]:
    return [one["id"] for one in of.anomalies("straggler") if not one["end_time"]]


def kill_in_capture(cluster: LoopCluster, moment: int) -> None:
    """As soon as it is asked for, when the start step is known, or when ranks record."""
    body = {"job": "train", "kind": "torch", "steps": 2}
    asked = cluster.http.post("/api/v1/captures", json=body)
    assert asked.status_code == 202, asked.text

    def has_come() -> bool:
        capture = cluster.http.get(f"/api/v1/captures/{asked.json()['id']}").json()
        states = {rank["state"] for rank in capture["ranks"]}
        reached = (True, capture["start_step"], states & {"armed"}, states & {"recording"})
        return bool(reached[moment] or capture["outcome"])

    poll(has_come, cluster.log)
    cluster.kill_fleet()


def nothing_is_armed(cluster: LoopCluster) -> bool:
    return all(one["outcome"] for node in cluster.nodes for one in node.get("captures"))


def losses(cluster: LoopCluster, job: str) -> dict[int, str]:
    text = cluster.nodes[0].log(f"{job}-0")
    return {int(step): loss for step, loss in _LOSS.findall(text)}


def test_ten_kills_of_the_fleet_raise_nothing_twice_and_leave_nothing_armed(cluster):
    faults = cluster.train("train", WARPWATCH_RUN="first")
    is_judged(cluster, "train", RANKS)
    (faults / "fault").write_text("slow_forward 3")
    (found,) = poll(lambda: stragglers(cluster), cluster.log)
    poll(lambda: cluster.get("captures") and nothing_is_armed(cluster), cluster.log)
    for number in range(KILLS):
        kill_in_capture(cluster, number % 4)
        # Ranks that wait for a start step have it, or disarm.
        poll(lambda: nothing_is_armed(cluster), cluster.log)
        cluster.start_fleet()
        poll(lambda: stragglers(cluster) == [found], cluster.log)
    # An agent that is killed while the fleet judges goes on keeping back what it finds.
    poll(lambda: not any(stragglers(node) for node in cluster.nodes), "handed back")
    cluster.nodes[0].lets_pass(SAVED_S)
    for node in cluster.nodes:
        node.kill_daemon()
        node.start_daemon()
    poll(lambda: len(cluster.up()) == 2, cluster.log)
    assert [stragglers(node) for node in cluster.nodes] == [[], []]
    assert len(re.findall("straggler: .*train ", cluster.log())) == 1
    asked = [one["request"]["anomaly_id"] for one in cluster.get("captures")]
    assert asked.count(found) == 1

    # The same training without Warpwatch.
    cluster.train("alone", WARPWATCH="0")
    poll(lambda: COMPARED_STEPS in losses(cluster, "alone"), "the training alone")
    told, alone = losses(cluster, "train"), losses(cluster, "alone")
    assert all(told[step] == alone[step] for step in range(10, COMPARED_STEPS + 1, 10))
    ranks = [rank for node in cluster.nodes for rank in node.get("ranks")]
    assert all(rank["status"] == "running" for rank in ranks)
    assert min(rank["steps_total"] for rank in ranks) >= max(told)
