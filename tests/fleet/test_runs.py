"""Runs over nodes, of the summaries that each agent keeps of its own ranks."""

import msgspec

from tests.cases import cases
from tests.fleet.nodes import NOW, OWNER, TestCluster, TestNode, run, seen
from tests.golden_lines import line
from warpwatch_fleet.runs import RunPart, merged
from warpwatch_telemetry.jobs import JobId, RunSummary


def shown(cluster: TestCluster) -> list[RunSummary]:
    parts = [part for node in cluster.cluster.nodes.values() for part in node.runs()]
    return merged(parts, cluster.cluster.raised)


def test_the_ranks_of_all_nodes_are_one_run(golden_case):
    one, other = TestNode("gpu-1"), TestNode("gpu-2", ahead_s=3600.0)
    cluster = TestCluster(one, other)
    cluster.hear()
    fast = {"step_counts": {400: 90}, "judged_steps": 90, "phases_s": {"forward": 0.2}}
    slow = fast | {"step_counts": {450: 10}, "judged_steps": 10, "world_size": 5}
    slow["phases_s"] = {"forward": 0.4}
    later = {"first_time": NOW + 3600, "time": NOW + 3670}
    # The fleet's own anomalies count, too.
    cluster.cluster.raised[JobId(OWNER, "llama", "41")] = {"straggler": 2}  # type: ignore[assignment]
    found: list[RunSummary] = []
    for ends in ({}, {"end_time": NOW + 3661}):
        about = {"energy_j": 5.0, "anomalies": {"oom": 1}, "captures": ("a",)}
        one.stream.put_runs([run(0, 1, **fast, **about, **dict.fromkeys(ends, NOW + 60))])
        other.stream.put_runs([run(2, 3, **slow, **later, **ends, captures=("a", "b"))])
        cluster.hear()
        found += shown(cluster)
    parts = [
        RunPart(
            JobId(OWNER, "llama", one.pop("run")), one.pop("node"), one.pop("ahead_s"),
            msgspec.json.encode(run(*one.pop("ranks"), **one)),
        )
        for one in cases(__file__)["parts"]
    ]  # fmt: skip
    found += merged(parts, {})
    assert found[-1].tokens_per_s is None
    golden_case("".join(line("run", one) for one in found))


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
    for number, node in enumerate(nodes):
        node.say(seen(number, 2, "other", run="41"))
    cluster.hear()
    leases = cluster.cluster.leases_due(cluster.now, ())
    assert [known.run for _, known, _ in leases] == ["start-0", "start-1", "41", "41"]
