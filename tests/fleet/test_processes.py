"""Processes of a fleet without their loops: one acts on changes, two workers answer as one."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from tests.fleet.nodes import NOW, OWNER, TestNode, run, seen
from warpwatch._version import __version__
from warpwatch_capturing.config import TriggersConfig
from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import AgentError, AgentLink
from warpwatch_fleet.bus.fleet import WorkerFleet
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.fleet import Fleet, _every
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
        return [Change("opened", found), Change("updated", replace(found, job="other"))]

    monkeypatch.setattr(fleet._source, "evaluate", evaluate)
    due = Mock(wraps=fleet._cluster.leases_due)
    monkeypatch.setattr(fleet._cluster, "leases_due", due)
    asyncio.run(fleet._evaluate())
    assert due.call_args.args[1] == {found.job_id}
    labels = {"kind": "straggler", "severity": "warning"}
    assert fleet.metrics.registry.get_sample_value("warpwatch_anomalies_total", labels) == 1
    assert caplog.messages[-1] == (
        "no lease of llama from gpu-1:9400, so that agent reports the job's anomalies beside this "
        "fleet: away (and 1 more)"
    )
    fleet._source.links.refusal = Refused("refused_busy", "it leaves")
    asyncio.run(fleet._evaluate())
    assert caplog.messages[-1].endswith(": it leaves (and 1 more)")
    assert len(fleet._changes) == 4
    fleet._source.links.refusal = AgentError("away")
    fleet._advance_triggers()
    assert fleet._changes == []
    (decision,) = fleet.overview().decisions
    assert (decision.anomaly_id, decision.outcome) == ("a1", "failed")
    loops: dict[str, Mock] = {}

    def every(name: str, interval_s: float, step: Any) -> Mock:
        return loops.setdefault(name, Mock(of=(interval_s, step.__name__)))

    monkeypatch.setattr(fleet._supervisor, "every", every)
    fleet._start_loops()
    assert {name: loop.of for name, loop in loops.items()} == {
        "captures": (5, "finish"), "stacks": (5, "finish_urgent"), "retention": (60, "retain"),
        "triggers": (0.5, "_advance_triggers"), "schedules": (30, "_advance_schedules"),
    }  # fmt: skip
    assert [job.id for job in fleet._schedules._rule.jobs(NOW)] == [found.job_id]
    assert fleet._alerts._recipes() == TriggersConfig().recipes
    fleet._wake()
    fleet._stop()
    assert [name for name, loop in loops.items() if loop.stop.called] == ["schedules"]
    assert [name for name, loop in loops.items() if loop.wake.called] == ["captures", "stacks"]


def test_a_fleet_exports_what_is_its_own_and_serves_the_first_socket(
    tmp_path, stack, monkeypatch, caplog
):
    node, link = TestNode("gpu-1"), "https://fleet.example.com"
    node.say(seen(0, 1, "one"))
    own: Any = {"public_url": link, "schedules": [{"job": "*", "every": 3600}]}
    fleet = worker(stack, tmp_path, node, **own)
    fleet._register.keep(TAKEN)
    assert Fleet._complete_state(fleet) is None
    fleet._cluster.nodes[node.address].reason = ""
    assert [one.job for one in Fleet._complete_state(fleet).ranks] == ["one"]
    found = Anomaly(NOW, "warning", "!", id="a1", kind="straggler", judged_by="fleet")
    theirs = replace(found, id="a2", time=NOW - 9, end_time=NOW, judged_by="agent")
    monkeypatch.setattr(fleet._cluster, "anomalies", lambda: iter((found, theirs)))
    assert [one.id for one in Fleet.overview(fleet).anomalies] == ["a2", "a1"]
    exported, active = fleet.exported(), list[Any]()
    assert (exported.anomalies, exported.captures, exported.public_url) == (
        (found,),
        (TAKEN,),
        link,
    )
    monkeypatch.setattr(fleet._schedules, "advance", lambda now, some: active.extend(some))
    fleet._advance_schedules()
    assert active == [found]
    fleet._cluster.raised[ASKED.job_id] = {"hang": 2}
    assert fleet._run_parts()[1] == {ASKED.job_id: {"hang": 2}}
    (file := tmp_path / "file").touch()
    places = [SimpleNamespace(path=path) for path in (file / "a", tmp_path / "b", tmp_path / "c")]
    monkeypatch.setattr("warpwatch_fleet.fleet.rendezvous.candidates", lambda *_: places)
    fleet._bind_locally()
    assert [one.name for one in tmp_path.glob("*-api")] == ["b-fleet-api"]
    del places[1:]
    fleet._bind_locally()
    assert caplog.messages[-1] == "no socket, so the web page needs the token"
    sleep = AsyncMock(side_effect=[None, asyncio.CancelledError])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(_every(7.0, AsyncMock(side_effect=ValueError)))
    assert [one.args for one in sleep.await_args_list] == [(7.0,), (7.0,)]
    assert caplog.messages[-1] == "a round of AsyncMock failed"


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
