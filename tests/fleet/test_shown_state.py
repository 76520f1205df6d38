"""All that a fleet knows of a job over two nodes, one with a clock of its own, as a golden file."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from tests.cases import cases
from tests.fleet.nodes import NOW, OWNER, TestCluster, TestNode, end, run, seen, step
from tests.golden_lines import line
from warpwatch._version import __version__
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.bus.fleet import WorkerDetails
from warpwatch_fleet.node import Node
from warpwatch_fleet.series import Series
from warpwatch_fleet.targets import Target
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, RankEvent


def test_all_that_is_known_of_two_nodes_is_golden(golden_case):
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2", ahead_s=40.0), TestNode("gpu-3"))
    Series(metrics := AgentMetrics(), cluster.cluster, lambda: cluster.now)
    first, second, third = cluster.nodes
    for number, node in enumerate((first, second)):
        places: Any = {
            "device": f"GPU-{number}",
            "pod_uid": f"pod-{number}",
            "time": NOW + node.ahead_s,
        }
        node.say(*(seen(2 * number + rank, **places) for rank in range(2)))
    cluster.hear()
    for number in range(1, 451):
        cluster.now += 0.5 if number <= 300 else 0.7
        # Rank 0 ends before the others get slow.
        for rank in range(number > 300, 4):
            node = cluster.nodes[rank // 2]
            # From step 301 on rank 3 computes longer, and the others wait for it.
            waits_s = 0.2 if number > 300 and rank != 3 else 0.0
            took_s = 0.5 + 0.2 * (number > 300)
            work: Any = {"samples": 8 + rank, "tokens": 100, "memory_allocated_bytes": rank << 30}
            work["phases_s"] = {"comm": 0.05 + waits_s, "forward": 0.1}
            node.say(step(rank, number, cluster.now + node.ahead_s, took_s, **work))
        if number == 300:
            first.say(end(0, cluster.now))
        if number % 10 == 0:
            cluster.hear()
    late = cluster.now + second.ahead_s
    second.say(RankEvent(late, "llama", 2, "stopped", {"silent_reason": "stopped"}, OWNER, "41"))
    first.say(RankEvent(cluster.now, "llama", 1, "resumed", {}, OWNER, "41"))
    second.say(
        DeviceReading(
            late, "GPU-1", {(f"device_{one}_ratio", ()): 0.5 for one in ("fan", "utilization")}
        ),
        DeviceReading(late, "GPU-9", {}, False, "lost"),
    )
    lost = Anomaly(late, "critical", "GPU 1 is lost", "llama", 2, "GPU-1", id="6", kind="xid",
                   owner=OWNER, run="41", end_time=late)  # fmt: skip
    second.stream.put_anomaly(lost)
    second.stream.put_runs([run(2, 3, time=late, first_time=NOW + 40)])
    cluster.hear(first, second)
    state, job = cluster.cluster, cluster.job()
    # A newer agent says something that this fleet does not know.
    state.feed(first.address, [b'{"type":"tomorrow","time":1}'], cluster.now)
    ranks = [replace(r, recent_s=r.recent_s[-3:]) for r in job.ranks(state.names(), cluster.now)]
    # As another worker gets them.
    sent = msgspec.msgpack.encode(WorkerDetails((), *state.detector_statuses()))
    details = msgspec.msgpack.decode(sent, type=WorkerDetails)
    known = {
        "job": [job.state()],
        "rank": ranks,
        "node": [node.health(cluster.now + 3) for node in state.nodes.values()],
        "device": [{"is": str(one)} for n in state.nodes.values() for one in n.samples.values()],
        "anomaly": cluster.anomalies(),
        **details.detectors,
        "suppressed": details.suppressed,
        "run": [json.loads(part.encoded) for node in state.nodes.values() for part in node.runs()],
    }
    lines = [line(name, one) for name, some in known.items() for one in some]
    lines += [f"{lease}\n" for lease in state.leases_due(cluster.now, ())]
    # An agent that was not heard claims the name of another, whose job has ended.
    state.nodes["gpu-9:9400"] = Node(Target("gpu-9:9400", node="gpu-3"))
    over = msgspec.structs.replace(end(0, cluster.now), job="short")
    third.say(seen(0, 1, "short"), over, step(9, 1, NOW))
    cluster.hear(third)
    cluster.now += 3
    text = "".join(lines) + generate_latest(metrics.registry).decode()
    golden_case(text.replace(__version__, "VERSION"))


def dated(about: Any) -> Any:
    """Return what a line says with times of the wall clock."""
    if not isinstance(about, dict):
        return [dated(one) for one in about] if isinstance(about, list) else about
    times = {key: one for key, one in about.items() if key.endswith("time") and one is not None}
    return {key: dated(one) for key, one in about.items()} | {
        key: at + NOW for key, at in times.items()
    }


@pytest.mark.parametrize("name", AGENTS := cases(__file__)["agents"])
def test_what_the_lines_of_an_agent_become_is_golden(name, golden_case, monkeypatch):
    for limit in ("RANKS", "CAPTURES", "RUNS", "DEVICES", "SENTENCES", "SERIES"):
        monkeypatch.setattr(f"warpwatch_fleet.node.MAX_{limit}", 3)
    bytes_ = {"EARLY_BYTES": 200, "RECORD_BYTES": 250, "ANOMALY_BYTES": 600, "RUN_BYTES": 900}
    for limit, most in (bytes_ | {"TEXT": 20, "ANOMALIES": 6}).items():
        monkeypatch.setattr(f"warpwatch_fleet.node.MAX_{limit}", most)
    labels = {"owner": "ns/team"} if "tenant" in name else {}
    target = Target("10.0.0.1:9400", labels, node="gpu-1" if "bus" in name else None)
    node, now, said = Node(target), NOW, list[str]()
    node.up = True
    for one in AGENTS[name]:
        try:
            if isinstance(one, float):
                now += one
            elif one == "down":
                node.up = False
            elif one == "begin":
                node.begin()
            else:
                text = one if isinstance(one, str) else json.dumps(dated(one))
                line_of_it = text.replace("DEEP", "[" * 100_000).encode("latin-1")
                said += [f"{record}\n" for record in node.feed(line_of_it, now)]
        except AgentError as error:
            said.append(f"{error}\n")
        refused = ", ".join(f"{why}: {count}" for why, count in node.refused.items())
        said.append(f"{one}: {node.lost} lost, {refused}; {len(node.unreported)} unreported\n")
    kinds = (("straggler", 1), ("straggler", 2), ("hang", 1), ("comm_slow", 1), ("data_stall", 1))
    same = [Anomaly(0, "info", "", "llama", rank, id="", kind=kind) for kind, rank in kinds]
    has = [node.has_active(one, JobId("", "llama", ""), "-fleet") for one in same]
    known: dict[str, Any] = {
        "node": [node.health(now)], "anomaly": node.anomalies(), "device": node.devices(),
        "capture": node.shown_captures(), "run": node.runs(),
    }  # fmt: skip
    said += [f"{node.name} {node.cursor} {node.version} {node.clock - NOW} {has}\n"]
    said += [f"{what} {one}\n" for what, some in known.items() for one in some]
    golden_case("".join(said).replace(__version__, "VERSION"), name)
