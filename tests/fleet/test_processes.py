"""Processes of a fleet without their loops: one acts on changes, two workers answer as one."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from tests.fleet.nodes import NOW, OWNER, TestNode, run, seen
from warpwatch._version import __version__
from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import AgentError, AgentLink
from warpwatch_fleet.bus.fleet import WorkerFleet
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.source import FleetSource
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest, RankCapture
from warpwatch_telemetry.errors import Refused

ASKED = CaptureRequest("two", "torch", "manual", steps=3, owner=OWNER, run="41")
RANK = RankCapture(0, "written", file="rank0.gz", node="gpu-1:9400")
TAKEN = Capture(
    "20261122T201500-000001", ASKED, NOW - 20, (RANK,), outcome="complete", files=("rank0.gz",)
)


class PlayedLink(AgentLink):
    """Every agent. ``refusal``: of all requests."""

    refusal: Exception | None = None
    holder = "fleet-0"

    def link(self, target: Target) -> AgentLink:
        return self

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return asdict(TAKEN)

    def download(self, path: str) -> Iterator[bytes]:
        if self.refusal is not None:
            raise self.refusal
        yield path.encode()


class PlayedWorker(WorkerFleet):
    other: WorkerFleet

    def _source_of(self, config: FleetFile) -> FleetSource:
        links: Any = PlayedLink()
        source = super()._source_of(config)
        source.links = links
        return source

    def _replies(self, operation: str, body: object) -> list[bytes]:
        return [asyncio.run(self.other._reply(operation, msgspec.json.encode(body)))]


def worker(stack: ExitStack, folder: Path, *nodes: TestNode, **own: Any) -> Any:
    """Return a worker that has read what the nodes said, without loops and without a bus."""
    own |= {"listen": "127.0.0.1:0", "state_dir": folder / nodes[0].name}
    found = PlayedWorker(FleetFile.model_validate({"fleet": own}))
    # A stop before the run closes what it listens on.
    stack.callback(found.server.run)
    stack.callback(found.server.stop)
    view, now = found._source.view, found.overview().time
    view.set_targets({node.address: Target(node.address) for node in nodes})
    for node in nodes:
        view.feed(node.address, node.lines(now), now)
        view.nodes[node.address].up = True
    return found


def test_what_is_opened_is_counted_captured_and_told(tmp_path, stack, monkeypatch, caplog):
    nodes = TestNode("gpu-1"), TestNode("gpu-2")
    for rank, node in enumerate(nodes):
        node.say(seen(rank, 2))
    fleet = worker(stack, tmp_path, *nodes, schedules=[{"job": "*", "every": 3600}])
    fleet._source.links.refusal = AgentError("away")
    about: dict[str, Any] = {"job": "llama", "owner": OWNER, "run": "41", "judged_by": "fleet"}
    found = Anomaly(NOW, "warning", "!", id="a1", kind="straggler", rank=1, **about)

    async def evaluate() -> list[Change]:
        return [Change("opened", found), Change("updated", found)]

    monkeypatch.setattr(fleet._source, "evaluate", evaluate)
    asyncio.run(fleet._evaluate())
    labels = {"kind": "straggler", "severity": "warning"}
    assert fleet.metrics.registry.get_sample_value("warpwatch_anomalies_total", labels) == 1
    assert caplog.messages[-1] == (
        "no lease of llama from gpu-1:9400, so that agent reports the job's anomalies beside this "
        "fleet: away (and 1 more)"
    )
    fleet._advance_triggers()
    (decision,) = fleet.overview().decisions
    assert (decision.anomaly_id, decision.outcome) == ("a1", "failed")
    loops: dict[str, Mock] = {}
    every = lambda name, interval_s, step: loops.setdefault(name, Mock(s=interval_s))  # noqa: E731
    monkeypatch.setattr(fleet._supervisor, "every", every)
    fleet._start_loops()
    intervals_s = {"captures": 5, "stacks": 5, "retention": 60, "triggers": 0.5, "schedules": 30}
    assert {name: loop.s for name, loop in loops.items()} == intervals_s
    fleet._stop()
    assert [name for name, loop in loops.items() if loop.stop.called] == ["schedules"]


def test_a_fleet_whose_bus_does_not_close_ends(tmp_path, stack, monkeypatch):
    fleet = worker(stack, tmp_path, TestNode("gpu-1"))
    is_over = threading.Event()
    monkeypatch.setattr(fleet, "_follow_all", lambda: asyncio.to_thread(is_over.wait))
    monkeypatch.setattr(fleet, "_bind_locally", lambda: None)
    monkeypatch.setattr("warpwatch_fleet.fleet.STOP_TIMEOUT_S", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    fleet.server.stop()
    fleet.run()
    (left,) = (thread for thread in threading.enumerate() if thread.name == "follow")
    assert left.daemon
    is_over.set()


def test_two_workers_answer_as_one(tmp_path, stack):
    workers: list[Any] = []
    for number, job in enumerate(("one", "two")):
        node = TestNode(f"gpu-{number}")
        node.say(seen(0, 1, job))
        node.stream.put_runs([run(0, job=job, first_time=NOW - 9 * number)])
        workers.append(worker(stack, tmp_path, node))
    first, second = workers
    first.other, second.other = second, first

    async def request(asked: CaptureRequest) -> Capture:
        first.captures.loop = second.captures.loop = asyncio.get_running_loop()
        capture: Capture = await asyncio.to_thread(first.request_capture, asked)
        return capture

    assert asyncio.run(request(ASKED)) == TAKEN
    chunks = first.capture_file(TAKEN.id, "rank0.gz", None)
    assert b"".join(chunks) == f"captures/{TAKEN.id}/rank0.gz".encode()
    assert first.capture_file(TAKEN.id, "rank1.gz", None) is None
    second._source.links.refusal = AgentError("away")
    with pytest.raises(Refused, match="gpu-1: away"):
        first.capture_file(TAKEN.id, "rank0.gz", None)
    second._source.links.refusal = Refused("refused_busy", "rank 0 is being captured")
    with pytest.raises(Refused, match="gpu-1: rank 0 is being captured") as refused:
        asyncio.run(request(ASKED))
    assert refused.value.reason == "refused_busy"
    with pytest.raises(Refused, match="running jobs: one"):
        asyncio.run(request(replace(ASKED, job="three")))

    # One that the first has run, of which the second knows a part; it began later.
    ran = replace(TAKEN, id="20261122T201500-000002", time=NOW - 10)
    first._register.keep(ran)
    (node,) = second._source.view.nodes.values()
    node.keep_capture(replace(ran, id=f"{ran.id}-2", of_fleet=True))
    for operation, views in (("view", first._views), ("details", first._details)):
        views.read({"second": asyncio.run(second._reply(operation, b""))})
    # While it does not reply, its last view stays.
    first._views.read({"second": b""})
    state = first.state()
    assert state.version == __version__
    assert [one.name for one in state.jobs] == [one.job for one in state.ranks] == ["one", "two"]
    assert [one.id for one in state.captures] == [TAKEN.id, ran.id]
    assert [one.job for one in first.run_summaries()] == ["two", "one"]
