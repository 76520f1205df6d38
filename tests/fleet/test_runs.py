"""Runs over nodes, of the summaries that each agent keeps of its own ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fleet.nodes import NOW, OWNER, TestCluster, TestNode, run, seen
from warpwatch_fleet.node import MAX_RUNS
from warpwatch_fleet.runs import merged
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.runs import RunSummary


def shown(cluster: TestCluster) -> list[RunSummary]:
    parts = [part for node in cluster.cluster.nodes.values() for part in node.runs()]
    return merged(parts, cluster.cluster.raised)


def test_the_ranks_of_all_nodes_are_one_run():
    one, other = TestNode("gpu-1"), TestNode("gpu-2", ahead_s=3600.0)
    cluster = TestCluster(one, other)
    cluster.hear()
    fast = {"step_counts": {400: 90}, "judged_steps": 90, "phases_s": {"forward": 0.2}}
    slow = {"step_counts": {450: 10}, "judged_steps": 10, "phases_s": {"forward": 0.4}}
    one.stream.put_runs([run(0, 1, **fast, energy_j=5.0, anomalies={"oom": 1}, captures=("a",))])
    later = {"first_time": NOW + 3600, "time": NOW + 3660}
    other.stream.put_runs([run(2, 3, **slow, **later, captures=("a", "b"))])
    cluster.hear()
    (together,) = shown(cluster)
    assert (together.ranks, together.node) == ((0, 1, 2, 3), "gpu-1, gpu-2")
    assert (together.steps, together.judged_steps, together.tokens_per_s) == (100, 100, 2000.0)
    assert together.phases_s == {"forward": pytest.approx(0.22)}
    assert together.step_counts == {400: 90, 450: 10}
    assert together.step_p50_s is not None and together.step_p95_s is not None
    assert 2 < together.step_p95_s / together.step_p50_s < 3
    assert (together.energy_j, together.captures) == (5.0, ("a", "b"))
    assert together.anomalies == {"oom": 1}
    assert abs(together.first_time - NOW) < 1
    assert together.end_time is None
    one.stream.put_runs([run(0, 1, **fast, end_time=NOW + 60)])
    other.stream.put_runs([run(2, 3, **slow, **later, end_time=NOW + 3661)])
    cluster.hear()
    (ended,) = shown(cluster)
    assert ended.end_time is not None and abs(ended.end_time - NOW - 61) < 1


def test_runs_without_an_id_are_joined_as_their_ranks_are():
    nodes = [TestNode("gpu-1"), TestNode("gpu-2")]
    cluster = TestCluster(*nodes)
    for number, node in enumerate(nodes):
        node.say(seen(number, run=f"start-{number}", master="gpu-1:29500"))
    cluster.hear()
    for number, node in enumerate(nodes):
        node.stream.put_runs([run(number, run=f"start-{number}")])
    cluster.hear()
    assert [(one.run, one.ranks) for one in shown(cluster)] == [("start-0", (0, 1))]


def test_what_an_agent_says_of_runs_is_checked_and_bounded():
    tenant, other = TestNode("sidecar"), TestNode("gpu-2")
    cluster = TestCluster(tenant, other, owner=OWNER)
    cluster.hear()
    wrong: list[dict[str, Any]] = [
        {"owner": "ns/other"},
        {"schema": 2},
        {"version": "v" * 501},
        {"first_time": 1e300},
    ]
    for fields in wrong:
        tenant.stream.put_runs([run(0, **fields)])
    other.stream.put_runs([run(0, run=str(number)) for number in range(MAX_RUNS + 5)])
    cluster.hear()
    assert cluster.cluster.count_refused() == {"bad_run": len(wrong)}
    assert [one.run for one in shown(cluster)] == [str(5 + number) for number in range(MAX_RUNS)]


def test_what_the_fleet_found_counts_for_the_run():
    node = TestNode("gpu-1")
    cluster = TestCluster(node)
    node.stream.put_runs([run(0, anomalies={"oom": 1})])
    cluster.hear()
    parts = list(cluster.cluster.nodes[node.address].runs())
    (found,) = merged(parts, {JobId(OWNER, "llama", "41"): {"straggler": 2}})
    assert found.anomalies == {"oom": 1, "straggler": 2}
