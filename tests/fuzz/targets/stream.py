"""Lines of an agent's stream, up to what the fleet shows and exports of them."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

from tests.daemon.http.conftest import CAPTURE, STRAGGLER
from tests.fleet.nodes import NOW, TestCluster, end, run, seen, step
from tests.fuzz.shown import check_shown
from tests.fuzz.watch import Target, json_tokens
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.targets import OWNER
from warpwatch_fleet.targets import Target as FleetTarget
from warpwatch_telemetry import stream
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock, DeviceReading, RankEvent
from warpwatch_telemetry.state import State

# The first byte of an input chooses: the agent of a node, or one of a tenant.
AGENTS = ("gpu-1:9400", "10.0.0.9:9400")
LABELS: tuple[dict[str, str], ...] = ({}, {OWNER: "ns/team"})
NAMED = stream.encode_stream_line(stream.CursorLine("c", "gpu-1", "0.3.0"))
# The fleet evaluates, and is scraped, once in so many inputs, with a second between two inputs.
EVALUATE_EACH = 64
# A fleet with thousands of jobs evaluates them for long: another one takes its place then.
INPUTS_OF_A_FLEET = 4096


class Stream:
    def __init__(self) -> None:
        self._now = NOW
        self._number = 0
        self._cluster = self._fleet()

    def _fleet(self) -> Cluster:
        cluster = TestCluster().cluster
        targets = zip(AGENTS, LABELS, strict=True)
        cluster.set_targets({one: FleetTarget(one, labels) for one, labels in targets})
        return cluster

    def run(self, data: bytes) -> None:
        self._number += 1
        self._now += 1.0
        address = AGENTS[(data[:1] or b"\0")[0] % 2]
        node = self._cluster.nodes[address]
        node.begin()
        node.up = True
        clock = encode_line(Clock(self._now)) or b""
        with contextlib.suppress(AgentError):
            lines = b"\n".join((NAMED.strip(), clock.strip(), data[1:], clock.strip()))
            self._cluster.feed(address, lines.split(b"\n"), self._now)
        if self._number % EVALUATE_EACH == 0:
            self._evaluate()
        if self._number % INPUTS_OF_A_FLEET == 0:
            self._cluster = self._fleet()

    def _evaluate(self) -> None:
        self._cluster.evaluate(self._now)
        self._cluster.forgotten.clear()
        assert not self._cluster.refused["error"], "a record was not refused in order"
        cluster, nodes = self._cluster, self._cluster.nodes.values()
        check_shown(
            State(
                self._now,
                "1",
                "fleet",
                devices=tuple(one for node in nodes for one in node.samples.values()),
                sources=tuple(node.health(self._now) for node in nodes),
                ranks=tuple(one for job in cluster.jobs.values() for one in job.ranks({}, 0.0)),
                jobs=tuple(job.state() for job in cluster.jobs.values()),
                anomalies=tuple(cluster.anomalies()),
                captures=tuple(one for node in nodes for one in node.shown_captures()),
            )
        )


def target(folder: Path) -> Target:
    about = DeviceReading(NOW, "GPU-a", {("device_power_watts", ()): 1.0}, index=0)
    event = RankEvent(NOW, "llama", 1, "exception", {"exception": "x"}, "ns/team", "41")
    records = (seen(1), step(1, 7, NOW), end(1, NOW), end(None, NOW), about, event)
    lines = [encode_line(one) or b"" for one in records]
    lines += [
        stream.encode_stream_line(one)
        for one in (
            stream.AnomalyLine(replace(STRAGGLER, owner="ns/team")),
            stream.CaptureLine(CAPTURE),
            stream.RunLine(run(0, 1)),
            stream.CursorLine("c-1", "gpu-1", "0.3.0"),
            stream.GapLine(3),
        )
    ]
    lines.append(json.dumps({"type": "later", "time": 1, "new": [1]}).encode() + b"\n")
    first = lines[0]
    seeds = [bytes([agent]) + first + line for line in lines for agent in (0, 1)]
    words = b'"type": "rank": "time": 1e300 \\u001b "owner":"ns/other" "job":'
    return Target(Stream().run, seeds, (*json_tokens(words), b"\n"))
