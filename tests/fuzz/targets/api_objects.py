"""What an API server answers the fleet: lists, watches, nodes, and objects that tenants wrote."""

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
from tests.fuzz.watch import Target
from warpwatch_fleet.config import KubernetesConfig
from warpwatch_fleet.kubernetes.api import KubernetesClient, KubernetesError
from warpwatch_fleet.kubernetes.captures import CaptureObjects
from warpwatch_fleet.kubernetes.conditions import Conditions, Taints
from warpwatch_fleet.kubernetes.events import EventPublisher
from warpwatch_telemetry.errors import Refused

# The first byte of an input: who asks, and the status of the answer.
NODES, LISTED, WATCHED = range(3)
STATUSES = (200, 200, 200, 404, 409, 410, 500)
LIST = {"metadata": {"resourceVersion": "7"}, "items": []}


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
        if self._who == LISTED or "watch" in request.url.params or "capt" not in request.url.path:
            return httpx.Response(self._status, content=self._content)
        return httpx.Response(200, json=LIST)

    def run(self, data: bytes) -> None:
        first, self._content = (data[:1] or b"\0")[0], data[1:]
        self._who = first % 3
        self._status = STATUSES[first // 3 % len(STATUSES)]
        work = self._nodes if self._who == NODES else self._captures
        with contextlib.suppress(KubernetesError):
            self._loop.run_until_complete(work())

    async def _nodes(self) -> None:
        cluster, now = self._told.cluster, lambda: NOW
        conditions = Conditions(self._api, cluster, now)
        events = EventPublisher(self._api, cluster, "", now)
        config = KubernetesConfig(conditions=True, taints=True, dry_run=False)
        works = conditions, Taints(self._api, config, conditions, events, now), events
        for work in works:
            with contextlib.suppress(KubernetesError):
                await work.advance()

    async def _captures(self) -> None:
        async def refuse(request: Any) -> None:
            raise Refused("refused_busy", "another capture runs")

        async def stop(seconds: float) -> None:
            raise asyncio.CancelledError

        played: Any = SimpleNamespace(request=refuse, shown=tuple)
        objects = CaptureObjects(self._api, played, threading.Lock(), "", lambda: NOW, sleep=stop)
        with contextlib.suppress(asyncio.CancelledError):
            await objects.follow()
        await objects.advance()


def target(folder: Path) -> Target:
    about = {"name": "once", "namespace": "team", "uid": "u" * 36, "resourceVersion": "8"}
    one: dict[str, Any] = {"metadata": about, "spec": {"job": "llama", "kind": "torch", "steps": 3}}
    asked = one | {"status": {"time": "2026-09-21T15:00:00Z", "detail": "asking"}}
    well = {"type": "GpuHealthy", "status": "True", "lastTransitionTime": "2026-09-21T15:00:00Z"}
    node = {"metadata": about | {"name": "gpu-1"}, "spec": {}, "status": {"conditions": [well]}}
    answers = [
        (NODES, node),
        (NODES, {"items": [node]}),
        (NODES, {"message": "no\nsuch node"}),
        (LISTED, LIST | {"items": [one, asked]}),
        (WATCHED, {"type": "ADDED", "object": one}),
        (WATCHED, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}),
        (WATCHED, {"type": "ERROR", "object": {"code": 410, "message": "too old"}}),
    ]
    seeds = [
        bytes([who + 3 * n]) + json.dumps(said).encode() for who, said in answers for n in (0, 4)
    ]
    tokens = (
        b'"metadata":', b'"spec":', b'"status":', b'"time":', b'"taints":', b'"items":', b"null",
        b"[[[[", b"{}", b"9" * 400, b"\\ud800", b"1e999", b'"2026-99"', b'"continue":""', b"[]",
    )  # fmt: skip
    return Target(ApiObjects(folder).run, seeds, tokens)
