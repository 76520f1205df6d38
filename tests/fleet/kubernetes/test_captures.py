"""Objects of kind Capture: real capture services, ranks that the test plays."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import cases
from tests.daemon.captures.capture_node import TRAIN
from tests.daemon.http.conftest import CAPTURE
from tests.fleet.capturing import PlayedFleet
from tests.fleet.kubernetes.api_server import CAPTURES, ApiServer
from tests.waiting import DEADLINE_S, POLL_S
from warpwatch_fleet.captures.requests import FleetCaptures
from warpwatch_fleet.kubernetes import captures as objects
from warpwatch_fleet.kubernetes.api import KubernetesClient, timestamp
from warpwatch_fleet.kubernetes.captures import CaptureObjects

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


def test_the_end_waits_ten_minutes_for_a_verdict() -> None:
    waiting = replace(CAPTURE, diagnosis=None, diagnosis_outcome=None, end_time=1000.0)
    early, late = (objects._news(waiting, "", {}, at) for at in (1600.0, 1601.0))
    assert early == {
        "captureId": CAPTURE.id,
        "outcome": "complete",
        "ranks": "2/2",
        "detail": "done",
    }
    assert late == early | {"endTime": timestamp(1000.0)}
    assert objects._news(waiting, "", late, 9999.0) == {}
    stored = replace(waiting, remote="s3://captures/1")
    assert objects._news(stored, "", late, 9999.0)["remote"] == "s3://captures/1"


def test_a_capture_of_another_owner_is_not_told() -> None:
    other = replace(CAPTURE, request=replace(CAPTURE.request, owner="ns/other"))
    api: Any = None
    captures: Any = SimpleNamespace(shown=lambda: (other,))
    own = CaptureObjects(api, captures, threading.Lock(), LINK, lambda: 1000.0)
    status = {"captureId": CAPTURE.id, "time": timestamp(1000.0)}
    for namespace, is_told in (("team", False), ("other", True)):
        about = {"namespace": namespace, "name": "once", "uid": "0a1b2c3d"}
        assert bool(own._progress({"metadata": about}, status)) == is_told


def test_an_object_of_another_form_keeps_no_other_from_being_answered(stand_in, tmp_path, stack):
    asked = Asked(stand_in, tmp_path, stack)
    asked.apply("odd")
    stand_in.ask("PATCH", f"{CAPTURES}/odd", {"spec": None})

    async def work(own: CaptureObjects) -> None:
        asked.apply(job="other")
        while "outcome" not in asked.status():
            await own.advance()
            await asyncio.sleep(POLL_S)

    asked.run(work)
    assert (asked.status("odd"), asked.status()["outcome"]) == ({}, "refused_no_rank")
