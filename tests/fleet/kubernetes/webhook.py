"""The webhook as the API server meets it, and pods before and after it."""

import asyncio
import base64
import contextlib
import copy
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.fleet.kubernetes.api_server import certificate
from tests.waiting import DEADLINE_S
from warpwatch_fleet.config import InjectionConfig
from warpwatch_fleet.kubernetes.injection import InjectionServer

GPU = {"limits": {"nvidia.com/gpu": 8}}
LABELS = {"warpwatch.dev/inject": "true", "batch.kubernetes.io/job-name": "llama"}
BOOTSTRAP = "/opt/warpwatch-shim/warpwatch/bootstrap"


class Served:
    """A webhook in a loop of its own."""

    def __init__(self, folder: Path, parts: str) -> None:
        self.folder = folder
        (folder / "pod.yaml").write_text(parts)
        cert, key = certificate(folder)
        config = InjectionConfig(
            listen="127.0.0.1:0", cert_file=cert, key_file=key, file=folder / "pod.yaml"
        )
        self.server = InjectionServer(config)
        self.port = self.server.listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self.server.run_beside())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.http = httpx.Client(
            base_url=f"https://127.0.0.1:{self.port}",
            verify=ssl.create_default_context(cafile=folder / "ca.crt"),
            timeout=DEADLINE_S,
        )

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    def close(self) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def busy_loop(self) -> Iterator[None]:
        """The loop that follows agents does something else meanwhile."""
        is_over = threading.Event()
        self._loop.call_soon_threadsafe(is_over.wait)
        try:
            yield
        finally:
            is_over.set()

    def review(self, pod: Any, namespace: str = "team") -> Any:
        asked = {"uid": "r1", "namespace": namespace, "object": pod}
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}
        answer = self.http.post("/inject?timeout=2s", json=body).json()["response"]
        assert (answer["uid"], answer["allowed"]) == ("r1", True)
        return answer

    def injected(self, pod: Any, **about: str) -> Any:
        patch = self.review(pod, **about).get("patch")
        return applied(pod, json.loads(base64.b64decode(patch)) if patch else [])


def applied(pod: Any, patch: list[Any]) -> Any:
    pod = copy.deepcopy(pod)
    for one in patch:
        *way, last = [int(p) if p.isdigit() else p for p in one["path"].split("/")[1:]]
        place = pod
        for part in way:
            place = place[part]
        if last == "-":
            place.append(one["value"])
        else:
            assert (one["op"] == "replace") == (last in place)
            place[last] = one["value"]
    return pod


def pod_of(*containers: Any, labels: Any = LABELS, **spec: Any) -> Any:
    listed = list(containers) or [{"name": "train", "image": "pytorch", "resources": GPU}]
    return {"metadata": {"name": "p", "labels": labels}, "spec": {"containers": listed, **spec}}


def env_of(container: Any) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
