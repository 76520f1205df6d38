"""Runs over nodes, of the summaries that each agent keeps of its own ranks."""

import itertools
from typing import Any

import pytest

from tests.fleet.nodes import NOW, OWNER, TestCluster, TestNode, run, seen
from tests.manual_clock import ManualClock
from warpwatch_fleet.runs import Runs, merged
from warpwatch_telemetry.jobs import JobId, RunSummary


def shown(cluster: TestCluster) -> list[RunSummary]:
    parts = [part for node in cluster.cluster.nodes.values() for part in node.runs()]
    return merged(parts, cluster.cluster.raised)


def test_the_ranks_of_all_nodes_are_one_run():
    one, other = TestNode("gpu-1"), TestNode("gpu-2", ahead_s=3600.0)
    cluster = TestCluster(one, other)
    cluster.hear()
    fast = {"step_counts": {400: 90}, "judged_steps": 90, "phases_s": {"forward": 0.2}}
    slow = {
        "step_counts": {450: 10},
        "judged_steps": 10,
        "phases_s": {"forward": 0.4},
        "world_size": 5,
    }
    one.stream.put_runs([run(0, 1, **fast, energy_j=5.0, anomalies={"oom": 1}, captures=("a",))])
    later = {"first_time": NOW + 3600, "time": NOW + 3670}
    other.stream.put_runs([run(2, 3, **slow, **later, captures=("a", "b"))])
    cluster.hear()
    # The fleet's own anomalies count, too.
    cluster.cluster.raised[JobId(OWNER, "llama", "41")] = {"straggler": 2}  # type: ignore[assignment]
    (together,) = shown(cluster)
    assert (together.ranks, together.node) == ((0, 1, 2, 3), "gpu-1, gpu-2")
    assert (together.steps, together.judged_steps, together.tokens_per_s) == (100, 100, 2000.0)
    assert together.phases_s == {"forward": pytest.approx(0.22), "other": pytest.approx(0.0)}
    assert together.step_counts == {400: 90, 450: 10}
    assert together.step_p50_s is not None and together.step_p95_s is not None
    assert 2 < together.step_p95_s / together.step_p50_s < 3
    assert (together.energy_j, together.captures, together.world_size) == (5.0, ("a", "b"), 5)
    assert together.anomalies == {"oom": 1, "straggler": 2}
    assert together.first_time == pytest.approx(NOW, abs=1)
    assert together.end_time is None
    one.stream.put_runs([run(0, 1, **fast, end_time=NOW + 60)])
    other.stream.put_runs([run(2, 3, **slow, **later, end_time=NOW + 3661)])
    cluster.hear()
    (ended,) = shown(cluster)
    assert ended.end_time == pytest.approx(NOW + 61, abs=1)
    assert ended.time == pytest.approx(NOW + 70, abs=1)


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


@pytest.mark.parametrize(
    "wrong", [{"owner": "ns/other"}, {"schema": 2}, {"version": "v" * 501}, {"first_time": 1e300}]
)
def test_what_an_agent_says_of_runs_is_checked_and_bounded(wrong: dict[str, Any]) -> None:
    tenant = TestNode("sidecar")
    cluster = TestCluster(tenant, owner=OWNER)
    tenant.stream.put_runs([run(0, **wrong)])
    tenant.stream.put_runs([run(0, run=str(number)) for number in range(25)])
    cluster.hear()
    assert cluster.cluster.count_refused() == {"bad_run": 1}
    assert [one.run for one in shown(cluster)] == [str(number) for number in range(5, 25)]


def test_runs_are_merged_anew_every_five_seconds():
    clock, read = ManualClock(), itertools.count(1)
    runs = Runs(lambda: ((), {JobId("", str(next(read)), ""): {}}), clock.monotonic)
    for after_s in (0.0, 5.0, 0.1, 4.9):
        clock.advance(after_s)
        assert runs.all() == []
    assert next(read) == 3
