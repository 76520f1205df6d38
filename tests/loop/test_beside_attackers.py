"""Acceptance: an honest job beside all attackers at once loses nothing and is judged as ever."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop.attackers import OWN_JOB, VICTIM, attack
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.other_users import OWNER, STRANGER, held_connections, request
from tests.loop.trainings import NOT_CAPTURED, ON_A_BUSY_MACHINE
from warpwatch_daemon.api_client import socket_path
from warpwatch_daemon.demo.processes import free_port

pytestmark = pytest.mark.hostile

RANKS, STRAGGLER = 8, 3
FLOODER, FILLER = 1236, 1237
FLOODED = 64
LEARNING_STEPS = 200
# argv: the user, a folder. The ranks are forked for speed, and what they import, also during a
# capture, is imported by root: the user may not be allowed to read it.
PROGRAM = """
import importlib, json, os, pkgutil, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import warpwatch
import encodings.ascii, encodings.idna
for module in pkgutil.walk_packages(warpwatch.__path__, "warpwatch."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

uid, folder, size = int(sys.argv[1]), Path(sys.argv[2]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
rank = next((rank for rank in range(size - 1) if os.fork() == 0), size - 1)
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
with torch.profiler.profile(with_stack=True) as profile:
    model(torch.randn(8, 64)).sum().backward()
profile.export_chrome_trace(str(folder / f"profile.{rank}.json"))
dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
os.setgroups([]), os.setgid(uid), os.setuid(uid)
monitor = warpwatch.attach(job="honest")
steps, goes_on = 0, torch.ones(1)
while goes_on.item():
    with monitor.step(samples=8):
        with monitor.phase("forward"):
            loss = model(torch.randn(8, 64)).square().mean()
            time.sleep(0.3 if rank == 3 and (folder / "fault").exists() else 0.2)
        with monitor.phase("comm"):
            goes_on = torch.tensor(float(not (folder / "stop").exists()))
            dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        with monitor.phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    steps += 1
with (folder / "counted").open("a") as file:
    file.write(json.dumps({"rank": rank, "steps": steps}) + chr(10))
"""


class Probe(threading.Thread):
    """Asks as a kubelet does, until it is ``done``."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._url = f"http://127.0.0.1:{port}/healthz"
        self.done = threading.Event()
        self.answers: list[int | str] = []

    def run(self) -> None:
        while not self.done.wait(0.5):
            try:
                self.answers.append(httpx.get(self._url, timeout=5).status_code)
            except httpx.HTTPError as error:
                self.answers.append(repr(error))


class Honest:
    def __init__(self, node: LoopNode) -> None:
        self.node = node
        self.folder = node.folder / "honest"
        self.folder.mkdir()
        os.chown(self.folder, OWNER, OWNER)
        node.start_rank(0, PROGRAM, str(OWNER), str(self.folder), world_size=RANKS)

    def of(self, part: str) -> list[Any]:
        wanted = {"job": VICTIM, "owner": f"uid/{OWNER}"}
        found: list[Any] = self.node.http.get(f"/api/v1/{part}", params=wanted).json()[part]
        return found

    def steps(self) -> dict[int, int]:
        return {rank["rank"]: rank["steps_total"] for rank in self.of("ranks")}

    def has_trained(self, steps: int) -> None:
        def all_have() -> bool:
            return len(self.steps()) == RANKS and min(self.steps().values()) >= steps

        poll(all_have, f"{steps} steps: {self.node.log('rank0')}")

    def end(self) -> dict[int, int]:
        (self.folder / "stop").touch()
        counted = self.folder / "counted"
        poll(lambda: counted.exists() and counted.read_text().count("\n") == RANKS, "its end")
        lines = map(json.loads, counted.read_text().splitlines())
        return {line["rank"]: line["steps"] for line in lines}


@pytest.fixture
def node(open_path: Path) -> Iterator[LoopNode]:
    probes = free_port()
    config: dict[str, Any] = {
        "http": {"probe_listen": f"127.0.0.1:{probes}"}, "detection": ON_A_BUSY_MACHINE,
        "triggers": {"recipes": {"straggler": {"ranks": "all", "steps": 3}} | NOT_CAPTURED},
    }  # fmt: skip
    with loop_node(open_path, **config) as node:
        node.start_daemon()
        probe = Probe(probes)
        probe.start()
        try:
            yield node
        finally:
            probe.done.set()
            probe.join()
        assert set(probe.answers) == {200}


@contextmanager
def all_attackers(node: LoopNode) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(attack(node, FLOODER, "records", "counts"))
        stack.enter_context(attack(node, STRANGER, "claims", "hand_over"))
        stack.enter_context(attack(node, FILLER, "restarts", "fill", "rename"))
        stack.enter_context(held_connections(FILLER, node.port, 127))
        yield


def asks_for_the_victims_stacks(node: LoopNode) -> list[int]:
    """The answers to a stranger, who has a job of the same name: on loopback, on the socket."""
    asked = {"job": VICTIM, "owner": f"uid/{OWNER}", "kind": "stacks"}
    path = "/api/v1/captures"
    return [request(STRANGER, where, path, asked)[0] for where in (node.port, api(node))]


def api(node: LoopNode) -> Path:
    return socket_path(node.run_dir)


def hand_over(node: LoopNode) -> None:
    """A stranger's own job is captured, and brings what is hard to read."""
    asked = {"job": OWN_JOB, "kind": "torch"}
    status, said = request(STRANGER, api(node), "/api/v1/captures", asked)
    assert status == 202, said


@pytest.mark.torch
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_honest_job_beside_all_attackers_loses_no_step_is_judged_and_captured(node):
    honest = Honest(node)
    with all_attackers(node):
        honest.has_trained(LEARNING_STEPS)
        hand_over(node)
        (honest.folder / "fault").touch()

        def anomalies() -> Any:
            return [one for one in honest.of("anomalies") if one["kind"] not in NOT_CAPTURED]

        found = poll(anomalies, node.log("daemon"))
        assert [(one["kind"], one["rank"]) for one in found] == [("straggler", STRAGGLER)]
        hand_over(node)

        def captures() -> Any:
            return [one for one in honest.of("captures") if one["diagnosis_outcome"]]

        (capture,) = poll(captures, node.log("daemon"))
        assert asks_for_the_victims_stacks(node) == [401, 404]
        counted = honest.end()
        poll(lambda: honest.steps() == counted, f"{honest.steps()}, not {counted}")
    assert set(counted) == set(range(RANKS))
    assert (capture["outcome"], capture["detail"], capture["diagnosis_outcome"]) == (
        "complete", "", "ok",
    )  # fmt: skip
    assert [(one["rank"], one["state"], one["verified"]) for one in capture["ranks"]] == [
        (rank, "written", True) for rank in range(RANKS)
    ]
    for rank in range(RANKS):
        labels = {"training_job": VICTIM, "owner": f"uid/{OWNER}", "rank": str(rank)}
        assert node.metric("warpwatch_records_lost_total", **labels) == 0
    # The attacks were carried out.
    rejected = node.metric("warpwatch_rendezvous_rejected_total", reason="too_many_records")
    assert rejected and rejected >= FLOODED
    (before, _) = (one for one in node.get("captures") if one["request"]["job"] == OWN_JOB)
    assert (before["outcome"], before["ranks"][0]["verified"]) == ("failed", False)
