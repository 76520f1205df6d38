"""Fuzzes an API server's answers to the fleet: lists, nodes, and objects that tenants wrote."""

import asyncio
import contextlib
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from tests.daemon.http.certificates import make_certificate
from tests.fleet.kubernetes.told import fault
from tests.fleet.nodes import NOW, TestCluster, TestNode
from tests.fuzz.watch import Target, json_tokens
from warpwatch_fleet.config import KubernetesConfig
from warpwatch_fleet.kubernetes.api import KubernetesClient, KubernetesError
from warpwatch_fleet.kubernetes.captures import CaptureObjects
from warpwatch_fleet.kubernetes.conditions import Conditions, Taints
from warpwatch_fleet.kubernetes.events import EventPublisher
from warpwatch_telemetry.errors import Refused

# The first byte of an input: who asks, and the status of the answer.
NODES, CAPTURES = range(2)
STATUSES = (200, 200, 200, 404, 409, 410, 500)


class ApiObjects:
    def __init__(self, folder: Path) -> None:
        make_certificate(folder, subject="DNS:localhost")
        (folder / "tls.crt").rename(folder / "ca.crt")
        (folder / "token").write_text("fleet")
        os.environ["KUBERNETES_SERVICE_HOST"] = "localhost"
        self._loop = asyncio.new_event_loop()
        self._api = KubernetesClient(folder)
        self._api._client = httpx.AsyncClient(
            base_url="https://localhost", transport=httpx.MockTransport(self._answer)
        )
        node = TestNode("gpu-1")
        node.stream.put_anomaly(fault())
        self._told = TestCluster(node)
        self._told.hear()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(self._status, content=self._content)

    def run(self, data: bytes) -> None:
        first, self._content = (data[:1] or b"\0")[0], data[1:]
        self._status = STATUSES[first // 2 % len(STATUSES)]
        work = self._nodes if first % 2 == NODES else self._captures
        with contextlib.suppress(KubernetesError):
            self._loop.run_until_complete(work())

    async def _nodes(self) -> None:
        cluster, now = self._told.cluster, lambda: NOW
        conditions = Conditions(self._api, cluster, now)
        events = EventPublisher(self._api, cluster, "", now)
        config = KubernetesConfig(conditions=True, taints=True, dry_run=False)
        taints = Taints(self._api, config, conditions, events, now)
        for work in (conditions.advance(), taints.advance(0), events.advance()):
            with contextlib.suppress(KubernetesError):
                await work

    async def _captures(self) -> None:
        async def refuse(request: Any) -> None:
            raise Refused("refused_busy", "another capture runs")

        played: Any = SimpleNamespace(start=refuse, shown=tuple, is_mine=lambda job: True)
        objects = CaptureObjects(self._api, played, threading.Lock(), "", lambda: NOW)
        await objects.advance()


def target(folder: Path) -> Target:
    about = {"name": "once", "namespace": "team", "uid": "u" * 36, "resourceVersion": "8"}
    one: dict[str, Any] = {"metadata": about, "spec": {"job": "llama", "kind": "torch", "steps": 3}}
    asked = one | {"status": {"time": "2026-09-21T15:00:00Z", "detail": "asking"}}
    well = {"type": "GpuHealthy", "status": "True", "lastTransitionTime": "2026-09-21T15:00:00Z"}
    node = {"metadata": about | {"name": "gpu-1"}, "spec": {}, "status": {"conditions": [well]}}
    answers = [
        (NODES, node), (NODES, {"items": [node]}), (NODES, {"message": "no\nsuch node"}),
        (CAPTURES, {"metadata": {"continue": ""}, "items": [one, asked]}),
    ]  # fmt: skip
    seeds = [
        bytes([who + 2 * n]) + json.dumps(said).encode() for who, said in answers for n in (0, 4)
    ]
    words = b'"metadata": "spec": "status": "time": "taints": "items": "2026-99" "continue":""'
    return Target(ApiObjects(folder).run, seeds, json_tokens(words))
