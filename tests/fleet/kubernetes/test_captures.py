"""Objects of kind Capture: real capture services, ranks that the test plays."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.cases import cases
from tests.daemon.captures.capture_node import TRAIN
from tests.daemon.http.conftest import CAPTURE
from tests.fleet.capturing import PlayedFleet
from tests.fleet.kubernetes.api_server import CAPTURES, ApiServer
from tests.waiting import DEADLINE_S, POLL_S
from warpwatch_fleet.captures.requests import FleetCaptures
from warpwatch_fleet.kubernetes import captures as objects
from warpwatch_fleet.kubernetes.api import KubernetesClient, KubernetesError, timestamp
from warpwatch_fleet.kubernetes.captures import CaptureObjects
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import JobId

TEAMS = TRAIN._replace(owner="ns/team")
KIND = {"apiVersion": "warpwatch.dev/v1alpha1", "kind": "Capture"}
LINK = "https://warpwatch.example.com"
Work = Callable[[CaptureObjects], Awaitable[None]]


class Asked:
    def __init__(self, server: ApiServer, folder: Path, stack: ExitStack) -> None:
        self.server = server
        self.fleet = PlayedFleet(folder, stack, job=TEAMS)

    def apply(self, name: str = "once", folder: str = CAPTURES, **spec: Any) -> None:
        spec = {"kind": "torch", "steps": 3} | spec
        self.server.ask("POST", folder, {**KIND, "metadata": {"name": name}, "spec": spec})

    def status(self, name: str = "once", folder: str = CAPTURES) -> Any:
        return self.server.ask("GET", f"{folder}/{name}").get("status") or {}

    def taken(self) -> list[int]:
        return [len(agent.captures()) for agent in self.fleet.agents]

    def run(self, work: Work) -> None:
        """``work`` with another fleet."""

        async def ask(captures: FleetCaptures) -> None:
            api = KubernetesClient(self.server.folder)
            wall = self.fleet.clock.wall
            lock = threading.Lock()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await work(CaptureObjects(api, captures, lock, LINK, wall))
            finally:
                await api.close()

        self.fleet.run(ask)

    def until(self, *names: str, field: str = "endTime") -> Any:
        """The status of the last, when the fleet has said this of all."""

        async def work(own: CaptureObjects) -> None:
            while not all(field in self.status(name) for name in names or ("once",)):
                await own.advance()
                await asyncio.sleep(POLL_S)

        self.run(work)
        return self.status(*names[-1:])


@pytest.fixture
def asked(server: ApiServer, tmp_path: Path, stack: ExitStack) -> Asked:
    return Asked(server, tmp_path, stack)


def test_a_capture_is_taken_once_and_its_status_says_what_came_of_it(asked: Asked) -> None:
    asked.apply(job="train", ranks=[0, 2], reason="slow since noon")
    status = asked.until(field="captureId")
    assert (status["time"], status["detail"]) == (timestamp(asked.fleet.clock.wall()), "running")
    # As one that was killed in between leaves it.
    asked.server.ask("PATCH", f"{CAPTURES}/once/status", {"status": {"captureId": None}})
    status = asked.until()
    assert (status["outcome"], status["ranks"]) == ("complete", "2/2")
    assert status["verdict"] == "host_bound"
    ident = status["captureId"]
    assert status["report"].startswith(f"{LINK}/api/v1/captures/{ident}")
    for agent in asked.fleet.agents:
        (own,) = agent.captures()
        assert own.request.reason.startswith("Capture team/once ")
        assert own.request.reason.endswith(": slow since noon")

    async def more(own: CaptureObjects) -> None:
        for _ in range(3):
            await own.advance()

    asked.run(more)
    assert asked.taken() == [1, 1]


@pytest.mark.parametrize(("spec", "outcome", "detail"), cases(__file__)["refused"])
def test_what_cannot_be_captured_has_a_reason_in_one_line(asked, spec, outcome, detail):
    asked.apply(**spec)
    status = asked.until()
    assert status["outcome"] == outcome
    assert detail in status["detail"]
    assert "\n" not in status["detail"]


def test_it_reaches_no_job_of_another_namespace(asked: Asked) -> None:
    other = CAPTURES.replace("/team/", "/default/")
    asked.apply("theirs", other, job="train", kind="stacks")
    asked.apply("after", job="other")
    try:
        asked.until("after")
        status = asked.status("theirs", other)
    finally:
        asked.server.ask("DELETE", f"{other}/theirs")
    assert status["outcome"] == "refused_no_rank"
    # Not even the names of running jobs are shown.
    assert "running jobs: none" in status["detail"]


class PlayedApi:
    """An API server with these replies; a number is the status of an error."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.asked = list(replies), list[str]()

    async def ask(self, method: str, path: str, body: Any = None, **about: Any) -> Any:
        self.asked.append(f"{method} {path} {about.get('params')} {body}")
        reply = self.replies.pop(0)
        if isinstance(reply, int):
            raise KubernetesError(reply, f"{reply}: no")
        return reply


ABOUT = {"namespace": "team", "name": "once", "uid": "0a1b2c3d-4e5f", "resourceVersion": "7"}
NEW = {"metadata": ABOUT, "spec": {"job": "train#0a1b2c", "kind": "torch"}}
OBJECTS = {
    "NEW": NEW, "ENDED": NEW | {"status": {"endTime": "x", "time": timestamp(0)}},
    "OTHERS": NEW | {"spec": {"job": "theirs#x"}},
    "RUNNING": NEW | {"status": {"time": timestamp(1000.0)}},
}  # fmt: skip


def played_objects(api: PlayedApi, now: float, link: str, *shown: Capture) -> CaptureObjects:
    async def start(request: CaptureRequest) -> Capture:
        return shown[0]

    def is_mine(job: JobId) -> bool:
        return job == JobId("ns/team", "train", "")

    captures: Any = SimpleNamespace(shown=lambda: shown, start=start, is_mine=is_mine)
    return CaptureObjects(cast(Any, api), captures, threading.Lock(), link, lambda: now)


def test_the_status_of_an_object_and_the_requests_for_it_are_golden(golden_case):
    table, lines = cases(__file__), []
    for name, about in table["news"].items():
        request = replace(CAPTURE.request, **{"owner": "ns/team"} | about.pop("request", {}))
        capture = replace(CAPTURE, request=request, end_time=1000.0)
        capture = replace(capture, **about.pop("capture", {}))
        own = played_objects(PlayedApi(), about.pop("now", 1000.0), about.pop("link", ""), capture)
        status = {"time": timestamp(1000.0), "captureId": capture.id} | about
        lines.append(f"{name}: {own._progress(NEW, status)}\n")
    for spec in table["specs"]:
        spec |= {"reason": "r" * 600} if spec.get("reason") == "LONG" else {}
        lines.append(f"{objects._body({'metadata': ABOUT, 'spec': spec}).request('ns/team')}\n")
    for name, replies in table["rounds"].items():
        for page in (one for one in replies if isinstance(one, dict)):
            page["items"] = [OBJECTS.get(str(one), one) for one in page["items"]]
        api = PlayedApi(*(OBJECTS.get(str(one), one) for one in replies))
        asked = replace(CAPTURE.request, owner="ns/team", reason="Capture team/once 0a1b2c3d")
        running = replace(CAPTURE, request=asked, outcome=None)
        try:
            asyncio.run(played_objects(api, 1000.0, "", running).advance())
        except KubernetesError as error:
            api.asked.append(str(error))
        lines += [f"{name}: {one}\n" for one in api.asked]
    golden_case("".join(lines))


def test_one_of_which_nothing_is_known_any_more_ends(asked: Asked) -> None:
    asked.apply(job="train")
    begun = timestamp(asked.fleet.clock.wall())
    asked.server.ask("PATCH", f"{CAPTURES}/once/status", {"status": {"time": begun}})

    async def work(own: CaptureObjects) -> None:
        asked.fleet.clock.advance(120)
        await own.advance()
        assert "outcome" not in asked.status()
        asked.fleet.clock.advance(1)
        await own.advance()

    asked.run(work)
    status = asked.status()
    assert (status["outcome"], status["detail"][:15]) == ("failed", "no longer known")
    assert asked.taken() == [0, 0]
