"""The whole loop, once of each kind: a fault to its diagnosis, a fleet of two agents.

test_hang_stacks.py has a hang, test_restart_in_anomaly.py a restart. Faults are many times as long
as a step, so that they stand out on a machine that is busy with other work too.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.loop.cluster import loop_cluster
from tests.loop.node import ApiAnswers, loop_node, poll
from tests.loop.programs import LOADING, STEPPING

# A busy machine takes its time to begin a step.
PATIENT = {"arm_timeout_s": 300, "cooldown_s": 0}
HANG = {"timeout_s": 20, "warmup_timeout_s": 0, "stopped_after_s": 3}


def diagnosed(site: ApiAnswers, anomaly: Any) -> list[Any]:
    return [one for one in site.captures(anomaly_id=anomaly["id"]) if one["diagnosis"]]


def is_over(site: ApiAnswers, kind: str) -> bool:
    return all(one["end_time"] for one in site.anomalies(kind))


@pytest.mark.torch
def test_a_slow_data_loader_is_found_captured_and_diagnosed(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    with loop_node(tmp_path, triggers=PATIENT) as node:

        def logs() -> str:
            return node.log("loading-0") + node.log("daemon")

        node.start_daemon()
        node.launch("loading", ["-c", LOADING, str(slow)])
        node.have_trained("loading", 1, 150)
        slow.touch()
        (stall,) = poll(lambda: node.anomalies("data_stall"), logs)
        assert (stall["job"], stall["severity"]) == ("loading", "warning")
        (capture,) = poll(lambda: diagnosed(node, stall), logs)
        assert (capture["outcome"], capture["ranks"][0]["verified"]) == ("complete", True)
        assert capture["diagnosis"]["verdict"] == "data_loading"
        assert "num_workers" in capture["diagnosis"]["findings"][0]["advice"]
        report = node.http.get(f"/api/v1/captures/{capture['id']}/report.html")
        assert (report.status_code, "data_loading" in report.text) == (200, True)
        labels = {"kind": "torch", "trigger": "anomaly", "outcome": "complete"}
        # A busy machine may have other anomalies as well.
        assert (node.metric("warpwatch_captures_total", **labels) or 0) >= 1
        slow.unlink()
        poll(lambda: is_over(node, "data_stall"), logs)


def test_a_rank_that_stops_is_one_hang_of_a_job_over_two_nodes(tmp_path: Path) -> None:
    with loop_cluster(tmp_path, 2, detection={"hang": HANG}, triggers=PATIENT) as cluster:
        cluster.start()
        ranks = [
            node.start_rank(number, STEPPING, "0.05", WARPWATCH_RUN="first")
            for number, node in enumerate(cluster.nodes)
        ]
        cluster.have_trained("stepping", 2, 50)
        assert [rank["host"] for rank in cluster.get("ranks")] == ["gpu-1", "gpu-2"]
        os.kill(ranks[1].pid, signal.SIGSTOP)
        (hang,) = poll(lambda: cluster.anomalies("hang"), cluster.log)
        assert (hang["rank"], hang["node"], hang["judged_by"]) == (1, "gpu-2", "fleet")
        (capture,) = poll(lambda: diagnosed(cluster, hang), cluster.log)
        assert capture["request"]["kind"] == "stacks"
        assert {one["node"]: one["state"] for one in capture["ranks"]}["gpu-1"] == "written"
        assert [node.anomalies("hang") for node in cluster.nodes] == [[], []]
        os.kill(ranks[1].pid, signal.SIGCONT)
        poll(lambda: is_over(cluster, "hang"), cluster.log)
