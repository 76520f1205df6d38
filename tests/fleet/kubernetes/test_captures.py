"""Objects of kind Capture: real coordinators, ranks that the test plays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import TRAIN
from tests.fleet.capturing import PlayedAgent, PlayedFleet
from tests.fleet.kubernetes.api_server import CAPTURES, ApiServer
from tests.fleet.kubernetes.stand_in import StandIn
from warpwatch_fleet.captures.requests import Captures
from warpwatch_fleet.kubernetes import captures as objects
from warpwatch_fleet.kubernetes.api import Api, timestamp
from warpwatch_fleet.kubernetes.captures import CaptureObjects
from warpwatch_telemetry.jobs import shard_key

TEAMS = TRAIN._replace(owner="ns/team")
WAIT_S = 60.0
Work = Callable[[CaptureObjects], Awaitable[None]]


class Asked:
    def __init__(self, server: ApiServer, folder: Path, stack: ExitStack) -> None:
        self.server = server
        self.shard = (0, 1)
        self.fleet = PlayedFleet(
            folder,
            stack,
            *(
                PlayedAgent(folder, stack, f"gpu-{number + 1}", range(2 * number, 2 * number + 2))
                for number in range(2)
            ),
            job=TEAMS,
        )

    def apply(self, name: str = "once", **spec: Any) -> None:
        kind = {"apiVersion": "warpwatch.dev/v1alpha1", "kind": "Capture"}
        spec = {"kind": "torch", "steps": 3} | spec
        self.server.ask("POST", CAPTURES, {**kind, "metadata": {"name": name}, "spec": spec})

    def status(self, name: str = "once") -> Any:
        return self.server.ask("GET", f"{CAPTURES}/{name}").get("status") or {}

    def run(self, work: Work) -> None:
        """``work`` with another fleet, that watches the objects."""

        async def ask(captures: Captures) -> None:
            api = Api(self.server.folder)
            link = "https://warpwatch.example.com"
            own = CaptureObjects(api, captures, threading.Lock(), self.shard, link)
            before = self.server.watches
            following = asyncio.create_task(own.follow())
            try:
                await work(own)
                # A connection that is cancelled while it is made is left open by httpcore.
                await asyncio.sleep(1.0 if before < 0 else 0.0)
                deadline = time.monotonic() + WAIT_S
                while 0 <= before == self.server.watches:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await api.close()

        self.fleet.run(ask)

    def until(self, name: str = "once", field: str = "endTime") -> Any:
        """The status, when the fleet has said this of it."""

        async def work(own: CaptureObjects) -> None:
            deadline = time.monotonic() + WAIT_S
            while field not in await asyncio.to_thread(self.status, name):
                assert time.monotonic() < deadline, self.status(name)
                await own.advance()
                await self.fleet.play_once()

        self.run(work)
        return self.status(name)


@pytest.fixture
def asked(server: ApiServer, tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield Asked(server, tmp_path, stack)


def test_a_capture_is_taken_once_and_its_status_says_what_came_of_it(asked: Asked) -> None:
    asked.apply(job="train", ranks=[0, 2], reason="slow since noon")
    status = asked.until()
    assert (status["outcome"], status["ranks"]) == ("complete", "2/2")
    assert status["verdict"]
    ident = status["captureId"]
    assert status["report"].startswith(f"https://warpwatch.example.com/api/v1/captures/{ident}")
    for agent in asked.fleet.agents:
        (own,) = agent.captures()
        assert own.request.reason.startswith("Capture team/once ")
        assert own.request.reason.endswith(": slow since noon")

    async def more(own: CaptureObjects) -> None:
        await asyncio.sleep(0.3)
        for _ in range(3):
            await own.advance()

    asked.run(more)
    assert [len(agent.captures()) for agent in asked.fleet.agents] == [1, 1]


@pytest.mark.parametrize(
    ("spec", "outcome", "detail"),
    [
        ({"job": "other"}, "refused_no_rank", "running jobs: train"),
        ({"job": "train", "ranks": [9]}, "refused_no_rank", "has no running rank 9"),
        (
            {"job": "train", "kind": "memory", "options": ["stacks"]},
            "refused_invalid",
            "options: kind torch has them, memory has none",
        ),
    ],
)
def test_what_cannot_be_captured_has_a_reason_in_one_line(
    asked: Asked, spec: dict[str, Any], outcome: str, detail: str
) -> None:
    asked.apply(**spec)
    status = asked.until()
    assert status["outcome"] == outcome
    assert detail in status["detail"]
    assert "\n" not in status["detail"]


def test_it_reaches_no_job_of_another_namespace(asked: Asked) -> None:
    other = CAPTURES.replace("/team/", "/default/")
    kind = {"apiVersion": "warpwatch.dev/v1alpha1", "kind": "Capture"}
    about = {"metadata": {"name": "theirs"}, "spec": {"job": "train", "kind": "stacks"}}
    asked.server.ask("POST", other, {**kind, **about})
    asked.apply("after", job="other")
    try:
        asked.until("after")
        status = asked.server.ask("GET", f"{other}/theirs")["status"]
    finally:
        asked.server.ask("DELETE", f"{other}/theirs")
    assert status["outcome"] == "refused_no_rank"
    # Not even what is there is told.
    assert "running jobs: none" in status["detail"]


def test_of_several_fleets_the_one_that_judges_the_job_takes_it(asked: Asked) -> None:
    for number in range(8):
        asked.apply(f"no-{number}", job=f"other-{number}")
    parts: list[list[str]] = [[], []]
    for number in range(8):
        index = shard_key(TEAMS._replace(name=f"other-{number}", run="")) % 2
        parts[index].append(f"no-{number}")
    for index, names in enumerate(parts):
        asked.shard = (index, 2)
        assert all(asked.status(name) == {} for name in names)
        for name in names:
            assert asked.until(name)["outcome"] == "refused_no_rank"


@pytest.mark.slow
def test_one_that_a_killed_fleet_had_begun_is_not_taken_a_second_time(asked: Asked) -> None:
    asked.apply(job="train", ranks=[0, 2])
    asked.until(field="captureId")
    status = {"status": {"captureId": None}}
    asked.server.ask("PATCH", f"{CAPTURES}/once/status", status)
    assert asked.until()["outcome"] == "complete"
    assert [len(agent.captures()) for agent in asked.fleet.agents] == [1, 1]


def test_one_of_which_nothing_is_known_any_more_ends(asked: Asked) -> None:
    asked.apply(job="train")
    long_ago = timestamp(time.time() - objects.LOST_S - 5)
    asked.server.ask("PATCH", f"{CAPTURES}/once/status", {"status": {"time": long_ago}})
    status = asked.until()
    assert (status["outcome"], status["detail"][:15]) == ("failed", "no longer known")
    assert [agent.captures() for agent in asked.fleet.agents] == [[], []]


def test_a_watch_that_the_server_has_forgotten_is_begun_with_a_list(
    stand_in: StandIn, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        asked = Asked(stand_in, tmp_path, stack)

        async def work(own: CaptureObjects) -> None:
            deadline = time.monotonic() + WAIT_S
            while not any("WATCH" in one for one in stand_in.asked):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await asyncio.to_thread(stand_in.drop_watches)
            await asyncio.to_thread(asked.apply, job="other")
            while "outcome" not in await asyncio.to_thread(asked.status):
                assert time.monotonic() < deadline
                await own.advance()
                await asyncio.sleep(0.05)

        asked.run(work)
        folder = "/apis/warpwatch.dev/v1alpha1/captures"
        looked = [one for one in stand_in.asked if one.endswith(folder)]
        assert looked[:3] == [f"GET {folder}", f"WATCH {folder}", f"GET {folder}"]
